// Decode passes by the kernels for Hopper, verb after verb as a layer has them: new keys and rows, lists, prefetches,
// small pools, NaN in keys and rows. The CPU's verbs go through the same passes, one by one. Scores are whole numbers,
// so selections and rows are equal; outputs are close, and NaN where the CPU's are.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "cuda_attended.hpp"
#include "cuda_host_rows.hpp"
#include "cuda_score_sift_stage.hpp"

namespace echo::cuda_test {
namespace {

using CudaWholePass = CudaScoreSift;

/// bf16, toward zero.
std::vector<std::uint16_t> high_halves(const std::vector<float>& values) {
  std::vector<std::uint16_t> halves(values.size());
  std::ranges::transform(values, halves.begin(), [](float value) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  });
  return halves;
}

/// What a pass is given, in a backend's memory, and what attention makes of it.
struct Given {
  Given(SiftWorld& world_, const Inputs& inputs, const std::vector<float>& new_keys, const std::vector<float>& new_rows,
        const std::vector<float>& q_)
      : world(world_),
        queries(world.backend, inputs.queries),
        weights(world.backend, inputs.weights),
        keys(world.backend, new_keys),
        rows(world.backend, new_rows),
        bf16_rows(world.backend, high_halves(new_rows)),
        q(world.backend, q_),
        out(world.backend, filled(q_.size() / 576 * 512, 7.0F)) {}

  void score() {
    ScoreParams params = params_of(world, world.all_rows(), queries.data(), DType::f32, weights.data());
    params.index_key = keys.data();
    params.index_key_dtype = DType::f32;
    world.backend.score(params);
  }
  void recall_and_attend(DType rows_dtype) {
    if (rows_dtype == DType::f32) {
      world.append_and_recall(rows, rows_dtype, /*scored=*/true);
    } else {
      world.append_and_recall(bf16_rows, rows_dtype, /*scored=*/true);
    }
    world.backend.attend({.layer = world.layer(),
                          .block = world.all_rows(),
                          .shape = world.shape,
                          .q = q.data(),
                          .q_dtype = DType::f32,
                          .scale = 0.07F,
                          .slots = world.slots.data(),
                          .out = out.data(),
                          .out_dtype = DType::f32,
                          .splits = world.sizes.splits});
  }

  SiftWorld& world;
  DeviceArray<float> queries;
  DeviceArray<float> weights;
  DeviceArray<float> keys;
  DeviceArray<float> rows;
  DeviceArray<std::uint16_t> bf16_rows;
  DeviceArray<float> q;
  DeviceArray<float> out;
};

/// The same world on both backends, which go through the same passes.
struct Passes {
  Passes(std::int32_t top_k, const Sizes& sizes)
      : cpu_backend(make_cpu_backend(0)),
        gpu_backend(make_cuda_backend(0, own_kernels())),
        cpu(*cpu_backend, fp8_shape(top_k), sizes),
        gpu(*gpu_backend, fp8_shape(top_k), sizes),
        engine(static_cast<unsigned>(top_k + sizes.batch)) {
    set_integer_keys(*this, 90);
    for (SiftWorld* world : {&cpu, &gpu}) {
      HostRows rows(*world);
      for (std::int32_t position = 0; position < sizes.score_stride(); position += 99) {
        rows.spoil(world->host_row_at(1, position));
      }
    }
  }

  /// A pass in which the sessions have such lengths, their new rows included.
  void run(std::int32_t tick, const std::vector<std::int32_t>& lengths) {
    const auto rows = static_cast<std::size_t>(cpu.sizes.rows());
    const Inputs inputs = integer_inputs(cpu, engine());
    auto new_keys = integer_keys(cpu, engine());
    auto new_rows = normal_floats(rows * 576, engine());
    for (std::size_t row = 0; row < rows; ++row) {
      if (engine() % 16 == 0) {
        new_keys[row * kDim + 9] = NAN;
        new_rows[row * 576 + engine() % 576] = NAN;
      }
    }
    const auto q = bf16_floats(rows * 64 * 576, static_cast<unsigned>(engine()));
    Given on_cpu(cpu, inputs, new_keys, new_rows, q);
    Given on_gpu(gpu, inputs, new_keys, new_rows, q);
    for (SiftWorld* world : {&cpu, &gpu}) {
      world->begin_sifting(tick, rows_behind(lengths, cpu.sizes.query_rows), /*claims=*/true);
    }
    on_cpu.score();
    cpu.plain_scores = cpu.scores.read();
    const Predictions predictions = predictions_of(cpu, engine() % 2 == 0 ? 1.0F : 1.3F);
    gpu.predict(predictions.thresholds, predictions.deviations);
    cpu.select(cpu.all_rows());
    const DType rows_dtype = tick % 4 == 1 ? DType::f32 : DType::bf16;
    on_cpu.recall_and_attend(rows_dtype);
    {
      const UnbrokenVerbs unbroken(gpu.backend);  // kernels begin before those ahead of them have ended
      gpu.sift(on_gpu.queries.data(), on_gpu.weights.data(), 1.0F, on_gpu.keys.data());
      gpu.select_sifted();
      on_gpu.recall_and_attend(rows_dtype);
    }
    gpu.backend.synchronize();
    ASSERT_EQ(gpu.index_keys.read(), cpu.index_keys.read());
    ASSERT_EQ(gpu.selection.read(), cpu.selection.read());
    ASSERT_EQ(gpu.host_pool(), cpu.host_pool());
    ASSERT_EQ(gpu.recalled_rows(), cpu.recalled_rows());
    ASSERT_EQ(gpu.counted().appended, cpu.counted().appended);
    cpu.check();
    gpu.check();
    expect_same_outputs(on_gpu.out.read(), on_cpu.out.read());
  }

  void expect_same_outputs(const std::vector<float>& got, const std::vector<float>& expected) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::isnan(got[i]), std::isnan(expected[i])) << i;
      ASSERT_TRUE(std::isnan(got[i]) || std::abs(got[i] - expected[i]) <= 2e-2F) << i;
      outputs[std::isnan(got[i]) ? 1 : 0] += 1;
    }
  }

  std::unique_ptr<Backend> cpu_backend;
  std::unique_ptr<Backend> gpu_backend;
  SiftWorld cpu;
  SiftWorld gpu;
  std::mt19937 engine;
  std::int64_t outputs[2] = {};  ///< numbers, and NaN
};

/// Sessions grow from at least `least` tokens, some sit a pass out; the pool holds a few rows more than a pass needs.
void run_passes(std::int32_t top_k, Sizes sizes, std::int32_t least, std::int32_t thread_blocks) {
  SCOPED_TRACE("k = " + std::to_string(top_k) + ", " + std::to_string(sizes.rows()) + " rows");
  sizes.slots = sizes.rows() * (top_k + 1) + 200;
  Passes passes(top_k, sizes);
  passes.gpu.thread_blocks = thread_blocks;
  std::mt19937 engine(91);
  std::vector<std::int32_t> lengths;
  for (std::int32_t entry = 0; entry < sizes.batch; ++entry) {
    const auto room = static_cast<std::uint32_t>(sizes.score_stride() - least - 10 * sizes.query_rows);
    lengths.push_back(entry == 0 ? sizes.query_rows : least + static_cast<std::int32_t>(engine() % room));
  }
  for (std::int32_t pass = 0; pass < 5; ++pass) {
    SCOPED_TRACE(pass);
    auto now = lengths;
    for (std::int32_t& length : now) {
      length = engine() % 8 == 0 ? kNone : length;
    }
    passes.run(1 + 2 * pass, now);
    ASSERT_FALSE(::testing::Test::HasFailure());
    for (std::size_t entry = 0; entry < lengths.size(); ++entry) {
      lengths[entry] += now[entry] == kNone ? 0 : sizes.query_rows;
    }
  }
  EXPECT_GT(passes.outputs[0], 0);
  EXPECT_GT(passes.outputs[1], 0);
  EXPECT_TRUE(thread_blocks == 0 || passes.gpu.counted().prefetched > 0);
}

TEST_F(CudaWholePass, DoesWhatTheCpuDoes) {
  run_passes(64, {.batch = 13, .table_stride = 40}, 1500, 6);
  run_passes(512, {.batch = 5, .query_rows = 4, .table_stride = 50}, 300, 4);
  run_passes(64, {.batch = 20, .query_rows = 2, .table_stride = 12}, 400, 0);
  run_passes(64, {.batch = 102, .table_stride = 6}, 1, 0);
  run_passes(2048, {.batch = 3, .table_stride = 110}, 1000, 0);
  run_passes(4096, {.batch = 3, .query_rows = 2, .table_stride = 160}, 4000, 4);
}

}  // namespace
}  // namespace echo::cuda_test
