#pragma once
// append_rows: new KV rows in their stored format, to their host rows (the backup) and to the slots of those that have
// one.
//
// A warp per row, or one for each part of it; both places get the same words. Lanes encode in step, so that each of
// their 4-byte words lies next to its neighbour's: stores are 128 bytes wide, also across the link. FP8: groups of 128
// elements, four per lane, whose maximum is found by shuffles. Cost: a chain of four loads and the arithmetic, 6.4 us
// for an FP8 row and a single warp, 3.4 for four; as quarters, whose elements do not wait for the other three
// loads, 1.5. Nobody waits for the stores, but it seems that a launch which wrote to the host ends 2 to 4 us behind
// that. 512 rows of a prefill write 0.3-0.6 MB to the host, 6-12 us of link time at its rate.

#include "cache_manager/nan_codes.cuh"
#include "cache_manager/residency.cuh"
#include "kernels/elements.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"
#include "kernels/step_rows.cuh"
#include "kernels/warp.cuh"

namespace echo {

/// Which part of a new row a warp encodes: FP8 groups, or words of a lane, in turns.
struct RowPart {
  std::int32_t index = 0;
  std::int32_t count = 1;

  /// Of this lane, among words that are dealt out one by one.
  __device__ std::int32_t first() const { return index * kWarp + lane_index(); }
  __device__ std::int32_t step() const { return count * kWarp; }
};

/// Where the words of a new row go.
struct NewRowWords {
  std::uint32_t* host;
  std::uint32_t* slot;  ///< null where the row has none

  __device__ void put(std::int32_t index, std::uint32_t word) const {
    host[index] = word;
    if (slot != nullptr) {
      slot[index] = word;
    }
  }
  /// Four codes.
  __device__ void put_codes(const LayerView& layer, std::int32_t index, std::uint32_t codes) const {
    put(index, codes);
    if (slot != nullptr && index < noted_codes(layer) / 4) {
      note_nan(layer, nan_marks(codes));
    }
  }
};

/// Elements [first, first + count) as bf16, from word `at` of the row on.
__device__ inline void put_bf16(const AppendParams& p, std::int64_t first, std::int32_t count, const RowPart& part,
                                const NewRowWords& words, std::int32_t at) {
  for (std::int32_t i = part.first(); i < count / 2; i += part.step()) {
    words.put(at + i,
              pack_bf16(load_float(p.kv, p.kv_dtype, first + 2 * i), load_float(p.kv, p.kv_dtype, first + 2 * i + 1)));
  }
}

/// A lane's four elements of a group as codes; the group's scale.
__device__ inline std::uint32_t encode_group(const float (&values)[4], float& scale) {
  float amax = 0.0F;
  for (const float value : values) {
    amax = amax_with(amax, value);
  }
  scale = power_of_two_scale(warp_max(amax));
  return pack_e4m3(scaled_down(values[0], scale), scaled_down(values[1], scale), scaled_down(values[2], scale),
                   scaled_down(values[3], scale));
}

__device__ inline void put_fp8(const AppendParams& p, std::int64_t first, const RowPart& part,
                               const NewRowWords& words) {
  static_assert(kFp8Group == 4 * kWarp);
  constexpr std::int32_t kAtOnce = 4;  // groups whose elements are under way together
  const std::int32_t groups = p.shape.latent_dim / kFp8Group;
  const std::int32_t scales = p.shape.latent_dim / 4;  // word of the first scale
  for (std::int32_t next = part.index; next < groups; next += kAtOnce * part.count) {
    float values[kAtOnce][4];
#pragma unroll
    for (std::int32_t i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (std::int32_t j = 0; j < 4; ++j) {
        const std::int32_t group = next + i * part.count;
        const std::int64_t element = first + group * kFp8Group + lane_index() * 4 + j;
        values[i][j] = group < groups ? load_float(p.kv, p.kv_dtype, element) : 0.0F;
      }
    }
#pragma unroll
    for (std::int32_t i = 0; i < kAtOnce; ++i) {
      const std::int32_t group = next + i * part.count;
      if (group >= groups) {
        break;
      }
      float scale;
      words.put_codes(p.layer, group * kWarp + lane_index(), encode_group(values[i], scale));
      if (lane_index() == 0) {
        words.put(scales + group, bits_of(scale));
      }
    }
  }
  put_bf16(p, first + p.shape.latent_dim, p.shape.rope_dim, part, words, scales + groups);
}

/// Fetches what put_row will read into the L2 cache, without waiting.
__device__ inline void prefetch_row(const AppendParams& p, std::int32_t row) {
  const std::int32_t dim = p.shape.latent_dim + p.shape.rope_dim;
  const std::int32_t bytes = p.kv_dtype == DType::u8 ? p.layer.row_bytes : dim * (p.kv_dtype == DType::f32 ? 4 : 2);
  const std::byte* first = row_address(static_cast<const std::byte*>(p.kv), row, bytes);
  for (std::int32_t done = lane_index() * ptx::kCacheLine; done < bytes; done += kWarp * ptx::kCacheLine) {
    ptx::prefetch(first + done);
  }
}

/// Encodes a part of the new row `row` of the pass. By one warp.
__device__ inline void put_row(const AppendParams& p, std::int32_t row, const RowPart& part, const NewRowWords& words) {
  const std::int32_t dim = p.shape.latent_dim + p.shape.rope_dim;
  const std::int64_t first = static_cast<std::int64_t>(row) * dim;
  if (p.kv_dtype == DType::u8) {
    const auto* encoded = reinterpret_cast<const std::uint32_t*>(
        row_address(static_cast<const std::byte*>(p.kv), row, p.layer.row_bytes));
    for (std::int32_t i = part.first(); i < p.layer.row_bytes / 4; i += part.step()) {
      words.put_codes(p.layer, i, encoded[i]);
    }
  } else if (p.shape.row_format == RowFormat::fp8_656) {
    put_fp8(p, first, part, words);
  } else if (p.shape.row_format == RowFormat::bf16_1152) {
    put_bf16(p, first, dim, part, words, 0);
  } else {
    for (std::int32_t i = part.first(); i < dim; i += part.step()) {
      words.put(i, bits_of(load_float(p.kv, p.kv_dtype, first + i)));
    }
  }
}

/// A group of an FP8 row, and with the first one what lies behind the groups: a quarter of the row. Elements are loaded
/// while it is found out where they go, and the host gets its words before that is known of the slot: a launch ends
/// when its writes to the host have arrived.
class Fp8Quarter {
 public:
  static constexpr std::int32_t kCount = 4;

  __device__ Fp8Quarter(const AppendParams& p, std::int32_t row, std::int32_t index)
      : dtype_(p.kv_dtype), index_(index) {
    const std::int64_t first = static_cast<std::int64_t>(row) * (kLatents + kRest);
#pragma unroll
    for (std::int32_t i = 0; i < 4; ++i) {
      codes_[i] = load_bits(p.kv, dtype_, first + index * kFp8Group + lane_index() * 4 + i);
    }
#pragma unroll
    for (std::int32_t i = 0; i < 2; ++i) {
      rest_[i] = has_rest() ? load_bits(p.kv, dtype_, first + kLatents + 2 * lane_index() + i) : 0U;
    }
  }

  /// To be called once: what is stored takes the place of the elements.
  __device__ void encode() {
    float values[4];
#pragma unroll
    for (std::int32_t i = 0; i < 4; ++i) {
      values[i] = float_of_bits(codes_[i], dtype_);
    }
    float scale;
    codes_[0] = encode_group(values, scale);
    scale_ = bits_of(scale);
    rest_[0] = pack_bf16(float_of_bits(rest_[0], dtype_), float_of_bits(rest_[1], dtype_));
  }
  __device__ void store(std::byte* row) const {
    auto* words = reinterpret_cast<std::uint32_t*>(row);
    words[index_ * kWarp + lane_index()] = codes_[0];
    if (lane_index() == 0) {
      words[kLatents / 4 + index_] = scale_;
    }
    if (has_rest()) {
      words[kLatents / 4 + kCount + lane_index()] = rest_[0];
    }
  }
  __device__ void note(const LayerView& layer) const { note_nan(layer, nan_marks(codes_[0])); }

 private:
  static constexpr std::int32_t kLatents = kCount * kFp8Group;
  static constexpr std::int32_t kRest = 2 * kWarp;

  __device__ bool has_rest() const { return index_ == 0; }

  DType dtype_;
  std::int32_t index_;
  std::uint32_t codes_[4];  ///< elements as they were loaded; then codes, in the first
  std::uint32_t rest_[2];   ///< likewise
  std::uint32_t scale_ = 0;
};

/// Writes a quarter of the new row `row`; see append_row.
__device__ inline void append_quarter(const AppendParams& p, std::int32_t row, std::int32_t index,
                                      const KernelErrorView& errors) {
  Fp8Quarter quarter(p, row, index);
  const std::int32_t target = new_host_row(p.layer, p.step, row, errors);
  if (target == kNone) {
    return;
  }
  const std::int32_t slot = slot_word(p.layer, target).load(cuda::memory_order_relaxed);
  quarter.encode();
  quarter.store(row_address(p.layer.slab, target, p.layer.host_stride));
  if (slot >= 0) {
    quarter.store(row_address(p.layer.pool, slot, p.layer.row_bytes));
    quarter.note(p.layer);
    if (index == 0 && lane_index() == 0) {
      count(&p.layer.counters->appended, 1);
    }
  }
}

/// Writes a part of the new row `row` of the pass, if there is one, to its host row, and to its slot if it has one. By
/// one warp. Others may look up rows, claim slots and fetch meanwhile: what begin gave to new rows stays with them.
__device__ inline void append_row(const AppendParams& p, std::int32_t row, const RowPart& part,
                                  const KernelErrorView& errors) {
  if (row >= p.step.rows) {
    return;
  }
  if (p.shape.row_format == RowFormat::fp8_656 && p.kv_dtype != DType::u8 && part.count == Fp8Quarter::kCount) {
    return append_quarter(p, row, part.index, errors);
  }
  prefetch_row(p, row);
  const std::int32_t target = new_host_row(p.layer, p.step, row, errors);
  if (target == kNone) {
    return;
  }
  const std::int32_t slot = slot_word(p.layer, target).load(cuda::memory_order_relaxed);
  if (slot >= 0 && part.first() == 0) {
    count(&p.layer.counters->appended, 1);
  }
  std::byte* host = row_address(p.layer.slab, target, p.layer.host_stride);
  std::byte* pool = slot >= 0 ? row_address(p.layer.pool, slot, p.layer.row_bytes) : nullptr;
  put_row(p, row, part,
          {.host = reinterpret_cast<std::uint32_t*>(host), .slot = reinterpret_cast<std::uint32_t*>(pool)});
}

}  // namespace echo
