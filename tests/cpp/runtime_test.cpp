// The runtime through its public C++ API, and what only its insides can reach.

#include "echo/runtime.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "runtime_world.hpp"

namespace echo::runtime_test {
namespace {

std::vector<float> decode(Runtime& runtime, TableModel& model, int steps) {
  const Session a = runtime.open_session(200);
  const Session b = runtime.open_session(200);
  const std::vector<std::int32_t> prompt = some_tokens(100);
  runtime.prefill(a, prompt, std::ref(model));
  runtime.prefill(b, std::span(prompt).first(50), std::ref(model));
  std::vector<float> outputs;
  for (int step = 0; step < steps; ++step) {
    Batch batch;
    batch.add(a, step);
    batch.add(b, step + 1);
    runtime.step(batch, std::ref(model));
    outputs.insert(outputs.end(), model.output.begin(), model.output.end());
  }
  return outputs;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(Runtime, DecodesTheSameBitsWithASmallPool) {
  TableModel model(small_shape());
  RuntimeConfig config = small_config();
  Runtime small(small_shape(), config);
  config.gpu_slots = 1024;
  Runtime large(small_shape(), config);
  const std::vector<float> expected = decode(large, model, 20);
  EXPECT_TRUE(same_bits(decode(small, model, 20), expected));
  EXPECT_GT(small.stats().recalled_bytes(), large.stats().recalled_bytes());
  for (const float value : expected) {
    ASSERT_TRUE(std::isfinite(value));
  }
}

TEST(Runtime, TicksStartOverWithoutAChangeOfBits) {
  TableModel model(small_shape());
  Runtime reference(small_shape(), small_config());
  const std::vector<float> expected = decode(reference, model, 20);

  const auto impl = std::make_shared<RuntimeImpl>(small_shape(), small_config());
  const Session a = impl->open_session(200);
  const Session b = impl->open_session(200);
  const std::vector<std::int32_t> prompt = some_tokens(100);
  RuntimeTestAccess::set_tick(*impl, kLastTick - 12);
  impl->prefill(a, prompt, std::ref(model));
  impl->prefill(b, std::span(prompt).first(50), std::ref(model));
  std::vector<float> outputs;
  for (int step = 0; step < 20; ++step) {
    Batch batch;
    batch.add(a, step);
    batch.add(b, step + 1);
    impl->step(batch, std::ref(model));
    outputs.insert(outputs.end(), model.output.begin(), model.output.end());
  }
  EXPECT_LT(RuntimeTestAccess::tick(*impl), 100);
  EXPECT_TRUE(same_bits(outputs, expected));
}

TEST(Runtime, RefusesWhatDoesNotFitTheMachineWithATable) {
  RuntimeConfig config = small_config();
  config.host_tokens = std::int64_t{1} << 30;
  try {
    Runtime runtime(ModelShape::deepseek_v32(), config);
    FAIL() << "it was constructed";
  } catch (const CapacityError& error) {
    EXPECT_NE(std::string(error.what()).find("host_pool"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("DOES NOT FIT"), std::string::npos) << error.what();
  }
}

TEST(Runtime, AForwardThatThrowsLeavesNothingBehind) {
  TableModel model(small_shape());
  Runtime runtime(small_shape(), small_config());
  Runtime reference(small_shape(), small_config());
  const std::vector<float> expected = decode(reference, model, 3);
  const Session a = runtime.open_session(200);
  const std::vector<std::int32_t> prompt = some_tokens(100);
  EXPECT_THROW(runtime.prefill(a, prompt,
                               [&](ForwardPass& pass) {
                                 model(pass);
                                 throw std::runtime_error("after all layers");
                               }),
               std::runtime_error);
  EXPECT_EQ(a.length(), 0);
  Session copy = a;
  copy.close();
  EXPECT_TRUE(same_bits(decode(runtime, model, 3), expected));
}

TEST(Runtime, AForwardThatSkipsALayerIsRefused) {
  Runtime runtime(small_shape(), small_config());
  const Session session = runtime.open_session(10);
  const std::int32_t token = 1;
  EXPECT_THROW(runtime.prefill(session, {&token, 1}, [](ForwardPass&) {}), StateError);
  EXPECT_EQ(session.length(), 0);
}

TEST(Runtime, ArraysHaveUpToFourDimensions) {
  float value = 0.0F;
  EXPECT_EQ(to_string(Array(&value, DType::f32, {1, 1, 1, 1})), "f32[1, 1, 1, 1]");
  EXPECT_THROW(Array(&value, DType::f32, {1, 1, 1, 1, 1}), InvalidArgument);
}

TEST(Runtime, ASessionThatWasClosedMeanwhileIsRefused) {
  const auto impl = std::make_shared<RuntimeImpl>(small_shape(), small_config());
  Session session = impl->open_session(100);
  session.close();  // by another thread, once a call of its had found it open
  const Session other = impl->open_session(100);
  EXPECT_THROW(impl->truncate(session, 0), StateError);
  EXPECT_THROW(impl->pause(session), StateError);
  EXPECT_THROW(impl->resume(session), StateError);
  EXPECT_FALSE(session.paused());
}

TEST(Runtime, SessionsOutliveTheirRuntimeAsClosedHandles) {
  Session session;
  {
    Runtime runtime(small_shape(), small_config());
    session = runtime.open_session(10);
    runtime.close();
    EXPECT_TRUE(session.closed());
    EXPECT_THROW(runtime.open_session(10), StateError);
    runtime.close();
  }
  session.close();
  EXPECT_TRUE(session.closed());
}

}  // namespace
}  // namespace echo::runtime_test
