#pragma once
// attend with given queries, for tests of any backend.

#include "cuda_pair.hpp"
#include "kernels/number_formats.hpp"

namespace echo::cuda_test {

template <typename Q>
std::vector<float> attend(World& world, const std::vector<Q>& q, DType q_dtype, DType out_dtype, BlockView block,
                          float scale = 0.07F) {
  const std::size_t outputs = static_cast<std::size_t>(world.sizes.rows() * world.shape.query_heads) *
                              static_cast<std::size_t>(world.shape.latent_dim);
  const DeviceArray queries(world.backend, q);
  // Poisoned, so that every output has to be written.
  const DeviceArray out(world.backend, std::vector<std::uint16_t>(outputs * (out_dtype == DType::f32 ? 2 : 1), 0xFFFF));
  world.backend.attend({.layer = world.layer(),
                        .block = block,
                        .shape = world.shape,
                        .q = queries.data(),
                        .q_dtype = q_dtype,
                        .scale = scale,
                        .slots = world.slots.data(),
                        .out = out.data(),
                        .out_dtype = out_dtype,
                        .splits = world.sizes.splits});
  const auto halves = out.read();
  std::vector<float> values(outputs);
  if (out_dtype == DType::f32) {
    std::memcpy(values.data(), halves.data(), outputs * sizeof(float));
  } else {
    std::ranges::transform(halves, values.begin(), from_bf16);
  }
  return values;
}

inline void expect_close(const std::vector<float>& got, const std::vector<float>& expected, float tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], tolerance) << i;
  }
}

}  // namespace echo::cuda_test
