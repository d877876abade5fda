#pragma once
// Queries, rows and selections for attend on tensor cores, and what the formula makes of them in double.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda_attend.hpp"
#include "reference/row_codec.hpp"

namespace echo::cuda_test {

inline constexpr std::int32_t kManyUsed = 300;

inline ShapeView wide_shape(RowFormat format, std::int32_t heads, std::int32_t top_k) {
  ShapeView shape = shape_of(format, IndexKeyFormat::fp8, top_k);
  shape.query_heads = heads;
  return shape;
}

/// bf16 values: what the tensor cores get is what the formula gets.
inline std::vector<float> bf16_floats(std::size_t count, unsigned seed, float spread = 1.0F) {
  std::vector<float> values = normal_floats(count, seed, spread);
  std::ranges::transform(values, values.begin(), [](float value) { return from_bf16(to_bf16(value)); });
  return values;
}

/// One world on the GPU with rows in slots [0, kManyUsed); the rest of the pool is 0xFF, so NaN.
struct Attended {
  Attended(const ShapeView& shape_, std::int32_t batch, std::int32_t splits)
      : shape(shape_),
        cpu_backend(make_cpu_backend(0)),
        backend(make_cuda_backend(0, own_kernels())),
        world(*backend, shape, {.slots = kManyUsed + 100, .batch = batch, .table_stride = 1, .splits = splits}),
        q(bf16_floats(static_cast<std::size_t>(batch) * q_row(), 51)) {
    const auto values = normal_floats(static_cast<std::size_t>(kManyUsed * dim()), 50);
    pool.assign(static_cast<std::size_t>(world.sizes.slots) * static_cast<std::size_t>(row_bytes_of(shape)),
                std::byte{0xFF});
    rows.resize(values.size());
    for (std::int32_t slot = 0; slot < kManyUsed; ++slot) {
      std::byte* row = pool.data() + static_cast<std::ptrdiff_t>(slot) * row_bytes_of(shape);
      encode_row(values.data() + static_cast<std::ptrdiff_t>(slot) * dim(), shape, row);
      decode_row(row, shape, rows.data() + static_cast<std::ptrdiff_t>(slot) * dim());
    }
    world.pool.write(pool);
  }

  std::int32_t dim() const { return shape.latent_dim + shape.rope_dim; }
  std::size_t q_row() const { return static_cast<std::size_t>(shape.query_heads) * static_cast<std::size_t>(dim()); }
  std::size_t out_row() const {
    return static_cast<std::size_t>(shape.query_heads) * static_cast<std::size_t>(shape.latent_dim);
  }

  /// Slots as `present(row, entry)` has them, random ones.
  void select(const std::function<bool(std::int32_t, std::int32_t)>& present, unsigned seed) {
    std::mt19937 engine(seed);
    slots.assign(world.entries(), kNone);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const auto k = static_cast<std::size_t>(shape.top_k);
      if (present(static_cast<std::int32_t>(i / k), static_cast<std::int32_t>(i % k))) {
        slots[i] = static_cast<std::int32_t>(engine() % static_cast<unsigned>(kManyUsed));
      }
    }
    world.slots.write(slots);
  }

  std::vector<float> run(DType q_dtype = DType::f32, DType out_dtype = DType::f32) {
    return q_dtype == DType::f32 ? attend(world, q, DType::f32, out_dtype, world.all_rows(), scale)
                                 : attend(world, upper_halves(q), DType::bf16, out_dtype, world.all_rows(), scale);
  }

  /// The formula in double, of one head.
  std::vector<double> expected(std::int32_t row, std::int32_t head) const {
    const float* query = q.data() + static_cast<std::size_t>(row) * q_row() + static_cast<std::ptrdiff_t>(head) * dim();
    std::vector<std::pair<double, const float*>> entries;
    double most = -std::numeric_limits<double>::infinity();
    for (std::int32_t i = 0; i < shape.top_k; ++i) {
      const std::int32_t slot =
          slots[static_cast<std::size_t>(row) * static_cast<std::size_t>(shape.top_k) + static_cast<std::size_t>(i)];
      if (slot != kNone) {
        const float* values = rows.data() + static_cast<std::ptrdiff_t>(slot) * dim();
        const double logit = static_cast<double>(scale) * std::inner_product(query, query + dim(), values, 0.0);
        entries.emplace_back(logit, values);
        most = std::max(most, logit);
      }
    }
    double sum = 0.0;
    std::vector<double> out(static_cast<std::size_t>(shape.latent_dim), 0.0);
    for (const auto& [logit, values] : entries) {
      const double weight = std::exp(logit - most);
      sum += weight;
      for (std::size_t d = 0; d < out.size(); ++d) {
        out[d] += weight * static_cast<double>(values[d]);
      }
    }
    for (double& value : out) {
      value = entries.empty() ? 0.0 : value / sum;
    }
    return out;
  }

  /// |error| / |expected| of some heads of all rows, each at most `tolerance`.
  void expect_formula(const std::vector<float>& got, double tolerance, const std::string& what) const {
    const std::int32_t step = shape.query_heads > 20 ? 21 : 5;
    for (std::int32_t row = 0; row < world.sizes.rows(); ++row) {
      for (std::int32_t head = row % step; head < shape.query_heads; head += step) {
        const std::vector<double> want = expected(row, head);
        const float* given = got.data() + static_cast<std::size_t>(row) * out_row() +
                             static_cast<std::ptrdiff_t>(head) * shape.latent_dim;
        double error = 0.0;
        double size = 0.0;
        for (std::size_t d = 0; d < want.size(); ++d) {
          const double difference = static_cast<double>(given[d]) - want[d];
          error += difference * difference;
          size += want[d] * want[d];
        }
        // A NaN fails too.
        ASSERT_TRUE(std::sqrt(error) <= tolerance * std::sqrt(size))
            << what << ": row " << row << ", head " << head << ": off by " << std::sqrt(error) << " of "
            << std::sqrt(size) << "; first columns " << given[0] << ", " << given[1] << " instead of " << want[0]
            << ", " << want[1];
      }
    }
  }

  ShapeView shape;
  float scale = 0.07F;
  std::unique_ptr<Backend> cpu_backend;
  std::unique_ptr<Backend> backend;
  World world;
  std::vector<float> q;
  std::vector<std::byte> pool;
  std::vector<float> rows;  ///< decoded
  std::vector<std::int32_t> slots;
};

/// Launches for some rows of a world, without waiting for them.
struct Launches {
  explicit Launches(Attended& attended_)
      : attended(attended_),
        halves(upper_halves(attended.q)),
        q(*attended.backend, halves),
        out(*attended.backend, std::vector<float>(halves.size() / attended.q_row() * attended.out_row(), NAN)) {}

  void run(std::int32_t first, std::int32_t count) {
    World& world = attended.world;
    attended.backend->attend({.layer = world.layer(),
                              .block = {.first = first, .count = count, .tick_offset = 0},
                              .shape = world.shape,
                              .q = q.data(),
                              .q_dtype = DType::bf16,
                              .scale = attended.scale,
                              .slots = world.slots.data() + static_cast<std::ptrdiff_t>(first) * world.shape.top_k,
                              .out = out.data(),
                              .out_dtype = DType::f32,
                              .splits = world.sizes.splits});
  }
  std::vector<float> result(std::size_t first, std::size_t count) {
    std::vector<float> values(count * attended.out_row());
    attended.backend->copy_to_host(values.data(), out.data() + first * attended.out_row(),
                                   values.size() * sizeof(float));
    return values;
  }

  Attended& attended;
  std::vector<std::uint16_t> halves;
  DeviceArray<std::uint16_t> q;
  DeviceArray<float> out;
};

/// Relative error: what bf16 weights and queries cost, and half a bit of a bf16 output.
inline double tolerance_of(RowFormat format, DType out = DType::f32) {
  return (format == RowFormat::fp8_656 ? 4e-3 : 2e-3) + (out == DType::bf16 ? 2e-3 : 0.0);
}

inline constexpr auto kEverything = [](std::int32_t, std::int32_t) { return true; };

}  // namespace echo::cuda_test
