#pragma once
// A shape that score and attention for Hopper both take, and its rows of 656 bytes in the host pool of a world.

#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_score_128_world.hpp"
#include "reference/row_codec.hpp"

namespace echo::cuda_test {

inline ShapeView fp8_shape(std::int32_t top_k) {
  ShapeView shape = shape_128(64);
  shape.query_heads = 64;
  shape.latent_dim = 512;
  shape.rope_dim = 64;
  shape.top_k = top_k;
  shape.row_format = RowFormat::fp8_656;
  return shape;
}

/// The rows, and NaN codes in them.
class HostRows {
 public:
  /// Makes all of them sound.
  explicit HostRows(World& world) : world_(world), bytes_(static_cast<std::size_t>(row_bytes_of(world.shape))) {
    const std::int32_t dim = world.shape.latent_dim + world.shape.rope_dim;
    const auto values = normal_floats(static_cast<std::size_t>(kKinds * dim), 80);
    kinds_.resize(kKinds * bytes_);
    for (std::int32_t kind = 0; kind < kKinds; ++kind) {
      encode_row(values.data() + static_cast<std::ptrdiff_t>(kind) * dim, world.shape, kind_of(kind));
    }
    for (std::int32_t row = 0; row < world.host_rows(); ++row) {
      mend(row);
    }
  }

  void mend(std::int32_t row) { std::memcpy(at(row), kind_of(row % kKinds), bytes_); }
  /// One code, of either sign, anywhere.
  void spoil(std::int32_t row) { at(row)[row * 37 % 512] = static_cast<std::byte>(row / 2 % 2 == 0 ? 0x7F : 0xFF); }
  /// As bytes that a step appends: sound.
  std::vector<std::byte> new_rows() const {
    return {kinds_.begin(), kinds_.begin() + static_cast<std::ptrdiff_t>(bytes_) * world_.sizes.rows()};
  }

 private:
  static constexpr std::int32_t kKinds = 61;

  std::byte* at(std::int32_t row) {
    return world_.slab.data() + row * (row_bytes_of(world_.shape) + World::kHostPadding);
  }
  std::byte* kind_of(std::int32_t kind) { return kinds_.data() + static_cast<std::size_t>(kind) * bytes_; }

  World& world_;
  std::size_t bytes_;
  std::vector<std::byte> kinds_;
};

}  // namespace echo::cuda_test
