// What a pass asks of the backend: when it begins, when rows are appended, what is forecast, what a failure leaves.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echo/errors.hpp"
#include "pass_world.hpp"

namespace echo::runtime_test {
namespace {

TEST_F(Pass, BeginComesOnceBeforeTheVerbs) {
  ASSERT_EQ(backend->begins.size(), 1U);  // the prefill of several blocks
  EXPECT_TRUE(backend->begins[0].layers.empty());
  EXPECT_GT(backend->recalls.size(), 2U);
  step(std::ref(model));
  ASSERT_EQ(backend->begins.size(), 1U);
  EXPECT_EQ(backend->begins[0].layers.size(), 2U);  // new rows get slots
  EXPECT_EQ(backend->begins[0].host_blocks, 16);
  EXPECT_NE(backend->begins[0].step.owners, nullptr);
  EXPECT_EQ(backend->recalls[0].step.owners, backend->begins[0].step.owners);
}

TEST_F(Pass, AttentionAppendsWithTheScoreAndTheRecallOfADecodeStepOnly) {
  for (const AppendParams& append : backend->appends) {  // the prefill
    EXPECT_NE(append.kv, nullptr);
  }
  for (const ScoreParams& score : backend->scores) {
    EXPECT_EQ(score.index_key, nullptr);
  }
  for (const RecallParams& recall : backend->recalls) {
    EXPECT_EQ(recall.kv, nullptr);
  }
  step(std::ref(model));
  EXPECT_EQ(backend->appends.size(), 0U);
  ASSERT_EQ(backend->scores.size(), 2U);
  ASSERT_EQ(backend->recalls.size(), 2U);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    EXPECT_NE(backend->scores[layer].index_key, nullptr);
    EXPECT_NE(backend->recalls[layer].kv, nullptr);
  }
}

TEST_F(Pass, ALayerWithoutAnIndexerHasItsRowsAppendedByTheRecall) {
  step([&](ForwardPass& pass) {
    model.begin(pass);
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      const auto arrays = model.inputs(pass, layer);
      if (layer == 1) {
        arrays->in.index_key = arrays->in.index_q = arrays->in.index_weights = {};
      }
      pass.attention(layer, arrays->in, model.out(pass, layer));
    }
  });
  EXPECT_EQ(backend->appends.size(), 0U);
  EXPECT_EQ(backend->scores.size(), 1U);
  ASSERT_EQ(backend->recalls.size(), 2U);
  EXPECT_NE(backend->recalls[1].kv, nullptr);
  EXPECT_NE(backend->recalls[0].scores, nullptr);
  EXPECT_EQ(backend->recalls[1].scores, nullptr);  // those are layer 0's
  EXPECT_EQ(impl->stats().layers[1].appended, 1);
}

TEST_F(Pass, WhatKernelsCannotReadIsRefusedBeforeAnythingIsWritten) {
  backend->alignment = 16;
  const auto misplaced = [](Array array, std::vector<std::byte>& memory) {
    const auto bytes = static_cast<std::size_t>(array.elements()) * size_of(array.dtype);
    memory.resize(bytes + 32);
    const std::uintptr_t first =
        (reinterpret_cast<std::uintptr_t>(memory.data()) + 15) / 16 * 16 + size_of(array.dtype);
    array.data = std::memcpy(reinterpret_cast<void*>(first), array.data, bytes);
    return array;
  };
  const Forward retried = [&](ForwardPass& pass) {
    model.begin(pass);
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      const auto arrays = model.inputs(pass, layer);
      std::vector<std::byte> memory;
      std::vector<std::byte> rows(static_cast<std::size_t>(pass.rows() * impl->plan().shape.row_bytes()));
      const Array encoded(rows.data(), DType::u8, {pass.rows(), impl->plan().shape.row_bytes()});
      for (const char* name : {"index_q", "q", "kv"}) {
        const std::string text = name;
        LayerInputs in = arrays->in;
        Array& spoiled = text == "kv" ? in.kv : text == "q" ? in.q : in.index_q;
        spoiled = misplaced(text == "kv" ? encoded : spoiled, memory);
        const auto before = backend->appends.size() + backend->scores.size() + backend->recalls.size();
        try {
          pass.attention(layer, in, model.out(pass, layer));
          ADD_FAILURE() << name << " was taken";
        } catch (const InvalidArgument& error) {
          EXPECT_EQ(std::string(error.what()).rfind(text + ": address", 0), 0U) << error.what();
        }
        EXPECT_EQ(backend->appends.size() + backend->scores.size() + backend->recalls.size(), before);
      }
      pass.attention(layer, arrays->in, model.out(pass, layer));
    }
  };
  step(retried);
  impl->prefill(session, some_tokens(20), retried);
  EXPECT_EQ(session.length(), 121);
}

TEST_F(Pass, VerbsOneByOneAppendAtOnce) {
  step_with([&](ForwardPass& pass, LayerArrays& arrays) {
    pass.append(0, arrays.in.kv, arrays.in.index_key);
    std::ranges::fill(arrays.kv, NAN);  // need not outlive the call
    std::ranges::fill(arrays.index_key, NAN);
    const RowBlock block = pass.blocks().front();
    pass.score(0, arrays.in.index_q, arrays.in.index_weights, block);
    pass.select(0, block);
    pass.recall(0, block);
    pass.attend(0, arrays.in.q, arrays.in.scale, model.out(pass, 0), block);
  });
  EXPECT_NE(backend->appends[0].kv, nullptr);
  EXPECT_EQ(impl->stats().layers[0].appended, 1);
  EXPECT_EQ(backend->recalls[0].kv, nullptr);
  const std::vector<float> output = model.output;
  Session twin = impl->open_session(200);
  impl->prefill(twin, some_tokens(100), std::ref(model));
  std::swap(session, twin);
  step(std::ref(model));
  EXPECT_EQ(std::memcmp(output.data(), model.output.data(), output.size() * sizeof(float)), 0);
}

TEST_F(Pass, AForecastFollowsTheRecallOfWhatWasSelected) {
  step(std::ref(model));
  EXPECT_TRUE(backend->forecasts_made.empty()) << "it has to be asked for on a CPU";
  RuntimeConfig config = small_config();
  config.forecast_cap = 1000;
  impl = std::make_shared<RuntimeImpl>(small_shape(), config);
  EXPECT_EQ(impl->plan().config.forecast_cap, 4) << "as far as it looks";
  backend = std::make_shared<RecordingBackend>(RuntimeTestAccess::backend(*impl));
  RuntimeTestAccess::use_backend(*impl, backend);
  session = impl->open_session(200);
  impl->prefill(session, some_tokens(100), std::ref(model));
  EXPECT_TRUE(backend->forecasts_made.empty()) << "a prefill makes none";
  step(std::ref(model));
  ASSERT_EQ(backend->forecasts_made.size(), 2U);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    const ForecastParams& forecast = backend->forecasts_made[layer];
    const RecallParams& recall = backend->recalls[layer];
    EXPECT_EQ(forecast.index, static_cast<std::int32_t>(layer));
    EXPECT_EQ(forecast.layer.pool, recall.layer.pool);
    EXPECT_EQ(forecast.scores, recall.scores);
    EXPECT_EQ(forecast.kth_score, recall.kth_score);
    EXPECT_EQ(forecast.cap, 4);
  }
  std::vector<std::int32_t> own(8, kNone);
  step_with([&](ForwardPass& pass, LayerArrays& arrays) {
    const RowBlock block = pass.blocks().front();
    pass.append(0, arrays.in.kv, arrays.in.index_key);
    pass.score(0, arrays.in.index_q, arrays.in.index_weights, block);
    pass.select(0, block);
    pass.recall(0, block, {own.data(), DType::i32, {1, 8}});
    EXPECT_TRUE(backend->forecasts_made.empty());
    pass.recall(0, block);
    EXPECT_EQ(backend->forecasts_made.size(), 1U);
  });
  EXPECT_GT(impl->stats().layers[0].forecast, 0);
  EXPECT_EQ(impl->stats().forecast_bytes(),
            (impl->stats().layers[0].forecast + impl->stats().layers[1].forecast) * small_shape().row_bytes());
}

TEST_F(Pass, ALayerIsAppendedToOnceAndAnAttentionThatFailedCanBeRepeated) {
  step(std::ref(model));
  const std::vector<float> expected = model.output;
  Session twin = impl->open_session(200);
  impl->prefill(twin, some_tokens(100), std::ref(model));
  std::swap(session, twin);
  step_with([&](ForwardPass& pass, LayerArrays& arrays) {
    backend->before_recall = [] { throw InvalidArgument("a backend's mishap"); };
    EXPECT_THROW(pass.attention(0, arrays.in, model.out(pass, 0)), InvalidArgument);
    backend->before_recall = {};
    EXPECT_THROW(pass.recall(0, pass.blocks().front()), StateError);  // the new row is nowhere yet
    pass.attention(0, arrays.in, model.out(pass, 0));
    EXPECT_THROW(pass.attention(0, arrays.in, model.out(pass, 0)), StateError);
    EXPECT_THROW(pass.append(0, arrays.in.kv, arrays.in.index_key), StateError);
    pass.score(0, arrays.in.index_q, arrays.in.index_weights, pass.blocks().front());
  });
  EXPECT_EQ(std::memcmp(expected.data(), model.output.data(), expected.size() * sizeof(float)), 0);
}

}  // namespace
}  // namespace echo::runtime_test
