#pragma once
// What tests of score share: queries, keys, the call, and the comparison with the CPU.

#include "cuda_pair.hpp"

namespace echo::cuda_test {

struct Inputs {
  std::vector<float> queries;
  std::vector<float> weights;
};

inline Inputs random_inputs(const World& world, unsigned seed) {
  const auto rows = static_cast<std::size_t>(world.sizes.rows());
  const auto heads = static_cast<std::size_t>(world.shape.index_heads);
  return {normal_floats(rows * heads * static_cast<std::size_t>(world.shape.index_dim), seed),
          normal_floats(rows * heads, seed + 1)};
}

/// Random keys, already encoded, in all blocks of both worlds.
inline void fill_keys(Pair& pair, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<std::byte> keys(pair.cpu.index_keys.size());
  const ShapeView& shape = pair.cpu.shape;
  const auto block_bytes = static_cast<std::size_t>(pair.cpu.index_block_bytes());
  const auto elements = static_cast<std::size_t>(kTokensPerBlock * shape.index_dim);
  for (std::size_t block = 0; block < keys.size() / block_bytes; ++block) {
    std::byte* out = keys.data() + block * block_bytes;
    if (shape.index_key_format == IndexKeyFormat::fp32) {
      const auto values = normal_floats(elements, seed + static_cast<unsigned>(block));
      std::memcpy(out, values.data(), block_bytes);
      continue;
    }
    for (std::size_t i = 0; i < elements; ++i) {
      const std::uint32_t code = engine() % 256;
      out[i] = static_cast<std::byte>(code % 128 == 127 ? 0U : code);  // no NaN
    }
    for (std::size_t token = 0; token < static_cast<std::size_t>(kTokensPerBlock); ++token) {
      const float scale = std::ldexp(1.0F, static_cast<int>(engine() % 5) - 9);
      std::memcpy(out + elements + token * sizeof scale, &scale, sizeof scale);
    }
  }
  pair.both([&](World& world) { world.index_keys.write(keys); });
}

inline ScoreParams params_of(World& world, BlockView block, const void* queries, DType dtype, const float* weights) {
  return {.layer = world.layer(),
          .step = world.step(),
          .block = block,
          .shape = world.shape,
          .index_q = queries,
          .index_q_dtype = dtype,
          .index_weights = weights,
          .scores = world.scores.data(),
          .score_stride = world.sizes.score_stride()};
}

/// Queries are handed over as `dtype`; bf16 takes the upper halves of the numbers.
inline void score(World& world, const Inputs& inputs, BlockView block, DType dtype = DType::f32) {
  const DeviceArray queries(world.backend, inputs.queries);
  const DeviceArray halves(world.backend, upper_halves(inputs.queries));
  const DeviceArray weights(world.backend, inputs.weights);
  const void* given = dtype == DType::f32 ? static_cast<const void*>(queries.data()) : halves.data();
  world.backend.score(params_of(world, block, given, dtype, weights.data()));
  world.backend.synchronize();  // before the inputs go
}

/// Compares the scores up to each row's position; behind it all must still be what it was.
inline void expect_close(const World& cpu, const World& gpu, const std::vector<std::int32_t>& positions) {
  const auto expected = cpu.scores.read();
  const auto got = gpu.scores.read();
  const auto stride = static_cast<std::size_t>(cpu.sizes.score_stride());
  float largest = 0.0F;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (static_cast<std::int32_t>(i % stride) <= positions[i / stride]) {
      largest = std::max(largest, std::abs(expected[i]));
    }
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (static_cast<std::int32_t>(i % stride) <= positions[i / stride]) {
      ASSERT_NEAR(got[i], expected[i], 2e-6F * largest) << "row " << i / stride << " token " << i % stride;
    } else {
      ASSERT_TRUE(std::isinf(got[i])) << "row " << i / stride << " token " << i % stride;
    }
  }
}

}  // namespace echo::cuda_test
