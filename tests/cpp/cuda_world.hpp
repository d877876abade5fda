#pragma once
// One layer with its memory and one batch, in the memory of any backend: the CPU's and the GPU's
// get the same calls and are compared.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "echo/errors.hpp"
#include "echo/runtime_config.hpp"
#include "kernels/params.hpp"
#include "runtime/backend.hpp"
#include "runtime/backends.hpp"

namespace echo::cuda_test {

/// An array in a backend's device memory.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(Backend& backend, const std::vector<T>& values)
      : backend_(&backend), buffer_(backend.device_memory(), values.size() * sizeof(T), "test array") {
    write(values);
  }

  T* data() const { return buffer_.template data<T>(); }
  std::size_t size() const { return buffer_.bytes() / sizeof(T); }
  void write(const std::vector<T>& values) {
    backend_->copy_to_device(buffer_.data(), values.data(), values.size() * sizeof(T));
  }
  std::vector<T> read() const {
    std::vector<T> values(size());
    backend_->copy_to_host(values.data(), buffer_.data(), buffer_.bytes());
    return values;
  }

 private:
  Backend* backend_;
  Buffer buffer_;
};

struct Sizes {
  std::int32_t slots = 64;
  std::int32_t batch = 2;
  std::int32_t query_rows = 1;
  std::int32_t table_stride = 4;  ///< blocks of a session
  std::int32_t splits = 4;
  std::int64_t score_stride() const { return static_cast<std::int64_t>(table_stride) * kTokensPerBlock; }
  std::int32_t rows() const { return batch * query_rows; }
  /// Every other block of the pool belongs to a session.
  std::int32_t host_blocks() const { return 2 * batch * table_stride; }
};

inline ShapeView shape_of(RowFormat rows, IndexKeyFormat keys = IndexKeyFormat::fp8, std::int32_t top_k = 16) {
  const bool small = rows == RowFormat::fp32 || rows == RowFormat::raw;
  return {.index_heads = 8,
          .index_dim = 48,
          .query_heads = 20,
          .latent_dim = small ? 48 : 512,
          .rope_dim = small ? 16 : 64,
          .top_k = top_k,
          .row_format = rows,
          .index_key_format = keys};
}

inline std::int32_t row_bytes_of(const ShapeView& shape) {
  const std::int32_t dim = shape.latent_dim + shape.rope_dim;
  switch (shape.row_format) {
    case RowFormat::fp8_656:
      return shape.latent_dim + shape.latent_dim / 128 * 4 + shape.rope_dim * 2;
    case RowFormat::bf16_1152:
      return 2 * dim;
    case RowFormat::fp32:
      return 4 * dim;
    case RowFormat::raw:
      return 528;  // a lane and a half more than four rounds of a warp
  }
  return 0;
}

class World {
 public:
  static constexpr std::int32_t kHostPadding = 32;  ///< bytes between host rows

  World(Backend& backend_, const ShapeView& shape_, const Sizes& sizes_)
      : backend(backend_),
        shape(shape_),
        sizes(sizes_),
        slab(backend.host_memory(), static_cast<std::size_t>(host_rows() * (row_bytes_of(shape) + kHostPadding)),
             "slab"),
        pool(backend, bytes(static_cast<std::int64_t>(sizes.slots) * row_bytes_of(shape))),
        index_keys(backend, bytes(sizes.host_blocks() * index_block_bytes())),
        slot_of(backend, none(host_rows())),
        host_of(backend, none(sizes.slots)),
        stamp(backend, none(sizes.slots)),
        replacement(backend, std::vector<std::int32_t>(sizeof(ReplacementState) / 4, 0)),
        counters(backend, std::vector<std::int64_t>(sizeof(LayerCounters) / 8, 0)),
        control(backend, none(control_words())),
        scores(backend, std::vector<float>(static_cast<std::size_t>(sizes.rows() * sizes.score_stride()),
                                           std::numeric_limits<float>::infinity())),
        selection(backend, std::vector<std::int32_t>(entries(), 1 << 30)),
        kth_score(backend, std::vector<float>(static_cast<std::size_t>(sizes.rows()), NAN)),
        slots(backend, std::vector<std::int32_t>(entries(), 1 << 30)) {
    std::memset(slab.data(), 0xFF, slab.bytes());
    backend.prepare({.shape = shape,
                     .layers = 3,
                     .rows = sizes.rows(),
                     .block_rows = sizes.rows(),
                     .slots = sizes.slots,
                     .host_rows = host_rows(),
                     .splits = sizes.splits});
  }

  std::int64_t host_rows() const { return static_cast<std::int64_t>(sizes.host_blocks()) * kTokensPerBlock; }
  std::int64_t index_block_bytes() const {
    const std::int64_t elements = static_cast<std::int64_t>(kTokensPerBlock) * shape.index_dim;
    return shape.index_key_format == IndexKeyFormat::fp8 ? elements + 4 * kTokensPerBlock : 4 * elements;
  }
  std::size_t entries() const { return static_cast<std::size_t>(sizes.rows()) * static_cast<std::size_t>(shape.top_k); }

  LayerView layer() {
    return {.pool = pool.data(),
            .slab = slab.device(),
            .slot_of = slot_of.data(),
            .host_of = host_of.data(),
            .stamp = stamp.data(),
            .index_keys = index_keys.data(),
            .replacement = reinterpret_cast<ReplacementState*>(replacement.data()),
            .counters = reinterpret_cast<LayerCounters*>(counters.data()),
            .slots = sizes.slots,
            .row_bytes = row_bytes_of(shape),
            .host_rows = host_rows(),
            .host_stride = row_bytes_of(shape) + kHostPadding,
            .index_block_bytes = index_block_bytes()};
  }
  StepView step() const {
    const std::int32_t* words = control.data();
    return {.tick = words,
            .tokens = words + 4,
            .positions = words + 4,
            .session = words + 4 + sizes.rows(),
            .block_table = words + 4 + 2 * sizes.rows(),
            .rows = sizes.rows(),
            .query_rows = sizes.query_rows,
            .table_stride = sizes.table_stride};
  }
  BlockView all_rows() const { return {.first = 0, .count = sizes.rows(), .tick_offset = 0}; }

  /// Uploads the control block of a pass: the rows' positions, sessions 0, 1, ..., tables of every
  /// other block.
  void begin(std::int32_t tick, const std::vector<std::int32_t>& positions) {
    std::vector<std::int32_t> words = none(control_words());
    words[0] = tick;
    std::ranges::copy(positions, words.begin() + 4);
    for (std::int32_t row = 0; row < sizes.rows(); ++row) {
      const bool padding = positions[static_cast<std::size_t>(row)] == kNone;
      words[static_cast<std::size_t>(4 + sizes.rows() + row)] = padding ? kNone : row / sizes.query_rows;
    }
    for (std::int32_t i = 0; i < sizes.batch * sizes.table_stride; ++i) {
      words[static_cast<std::size_t>(4 + 2 * sizes.rows() + i)] = 2 * i + 1;
    }
    backend.upload_control(control.data(), words.data(), words.size() * sizeof(std::int32_t));
  }

  template <typename T, typename U>
  void append(const DeviceArray<T>& kv, DType kv_dtype, const DeviceArray<U>& keys, DType keys_dtype, bool to_slots) {
    backend.append({.layer = layer(),
                    .step = step(),
                    .shape = shape,
                    .kv = kv.data(),
                    .kv_dtype = kv_dtype,
                    .index_key = keys.data(),
                    .index_key_dtype = keys_dtype,
                    .to_slots = to_slots});
  }
  void select(BlockView block) {
    backend.select({.step = step(),
                    .block = block,
                    .shape = shape,
                    .scores = scores.data(),
                    .score_stride = sizes.score_stride(),
                    .selection = selection.data(),
                    .kth_score = kth_score.data()});
  }
  void recall(BlockView block) {
    backend.recall({.layer = layer(),
                    .step = step(),
                    .block = block,
                    .shape = shape,
                    .selection = selection.data() + static_cast<std::int64_t>(block.first) * shape.top_k,
                    .slots = slots.data()});
  }

  /// Everything an append, a recall or a release may change, for comparison.
  std::vector<std::byte> state() {
    backend.synchronize();
    std::vector<std::byte> all(slab.data(), slab.data() + slab.bytes());
    const auto add = [&](const auto& array) {
      const auto values = array.read();
      const auto* begin = reinterpret_cast<const std::byte*>(values.data());
      all.insert(all.end(), begin, begin + values.size() * sizeof(values[0]));
    };
    add(pool);
    add(index_keys);
    add(slot_of);
    add(host_of);
    add(stamp);
    add(replacement);
    add(counters);
    return all;
  }

  Backend& backend;
  ShapeView shape;
  Sizes sizes;
  Buffer slab;
  DeviceArray<std::byte> pool;
  DeviceArray<std::byte> index_keys;
  DeviceArray<std::int32_t> slot_of;
  DeviceArray<std::int32_t> host_of;
  DeviceArray<std::int32_t> stamp;
  DeviceArray<std::int32_t> replacement;
  DeviceArray<std::int64_t> counters;
  DeviceArray<std::int32_t> control;
  DeviceArray<float> scores;
  DeviceArray<std::int32_t> selection;
  DeviceArray<float> kth_score;
  DeviceArray<std::int32_t> slots;

 private:
  static std::vector<std::byte> bytes(std::int64_t count) {
    return std::vector<std::byte>(static_cast<std::size_t>(count), std::byte{0xFF});
  }
  static std::vector<std::int32_t> none(std::int64_t count) {
    return std::vector<std::int32_t>(static_cast<std::size_t>(count), kNone);
  }
  std::int64_t control_words() const {
    return 4 + 2 * sizes.rows() + static_cast<std::int64_t>(sizes.batch) * sizes.table_stride;
  }
};

/// The same world on the CPU and on the GPU.
struct Pair {
  Pair(const ShapeView& shape, const Sizes& sizes)
      : cpu_backend(make_cpu_backend(1)),
        gpu_backend(make_cuda_backend(0, RuntimeConfig{})),
        cpu(*cpu_backend, shape, sizes),
        gpu(*gpu_backend, shape, sizes) {}

  template <typename Call>
  void both(Call call) {
    call(cpu);
    call(gpu);
  }

  std::unique_ptr<Backend> cpu_backend;
  std::unique_ptr<Backend> gpu_backend;
  World cpu;
  World gpu;
};

/// Skips where no GPU can be used.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) {
      GTEST_SKIP() << "no CUDA device, or a build without the CUDA backend";
    }
  }
};

inline std::vector<float> normal_floats(std::size_t count, unsigned seed, float spread = 1.0F) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> values(count);
  std::ranges::generate(values, [&] { return normal(engine); });
  return values;
}

/// Bit patterns of every kind: zeros, subnormals, ordinary and huge values, infinities, NaN.
inline std::vector<float> wild_floats(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<float> values = normal_floats(count, seed);
  for (float& value : values) {
    const auto kind = static_cast<std::uint32_t>(engine() % 16U);
    if (kind < 4) {
      const auto any = static_cast<std::uint32_t>(engine());
      const std::uint32_t bits = kind == 0 ? any : (any & 0x80000000U) | (any % 8U) << 20;
      std::memcpy(&value, &bits, sizeof value);
    } else if (kind == 4) {
      value = std::ldexp(value, static_cast<int>(engine() % 40) - 20);
    }
  }
  return values;
}

inline std::vector<std::uint16_t> upper_halves(const std::vector<float>& values) {
  std::vector<std::uint16_t> halves;
  for (const float value : values) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    halves.push_back(static_cast<std::uint16_t>(bits >> 16));
  }
  return halves;
}

}  // namespace echo::cuda_test
