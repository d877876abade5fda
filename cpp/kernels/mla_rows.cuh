#pragma once
// A gathering warp's rows of a half: loaded, unpacked and stored where the tensor cores read them (mla_tile.cuh).
//
// Warp w of the eight has entries 8 w to 8 w + 7 of each half; its lanes i and i + 16 have the slot of entry i % 8 of
// half i / 8. FP8 rows go through registers: a lane has ten pieces of 16 bytes in flight (41 KB per block), then
// unpacks and stores them. A load is the latents of one row: a quarter of a warp reads 128 bytes of it, where those of
// two rows would be twice as many requests. BF16 rows are copied as they are. Cost of a half, for a warp on an H200:
// 300 to 500 cycles to start loads, 1,500 to 2,000 until they are there, 1,200 to 1,400 to unpack and store.
// Where selections are one split, FP8 rows are loaded and stored otherwise: mla_whole.cuh.

#include <cstddef>
#include <cstdint>

#include "cache_manager/address.hpp"
#include "cache_manager/nan_codes.cuh"
#include "kernels/mla_tile.cuh"
#include "kernels/mla_unpack.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"
#include "kernels/ptx/tensor_copy.cuh"

namespace echo::mla {

inline constexpr std::uint32_t kWarpEntries = kHalf / kGatherWarps;  ///< of a warp, in a half
inline constexpr std::uint32_t kWarpSlots = kTile / kGatherWarps;    ///< a lane and the one 16 further have the same
static_assert(kWarpEntries == 8 && kWarpSlots == kWarp / 2);

/// Which of the gathering threads this is, read anew: what follows from it takes fewer instructions than registers.
__device__ __forceinline__ std::uint32_t gatherer() { return ptx::thread_anew() - kConsumers; }

/// A half's rows, on their way.
template <RowFormat kFormat>
class Gather;

inline constexpr std::uint32_t kFp8Scales = kLatent;  ///< offset of the scales in a row

/// What is read of rows where there are none: zeros.
__device__ const uint4 kNothing[kLatent / sizeof(uint4)] = {};

__device__ __forceinline__ std::uint32_t fp8_scale(const std::byte* row, std::uint32_t group) {
  return *reinterpret_cast<const std::uint32_t*>(row + kFp8Scales + group * 4);
}

/// Slot of entry `entry` of the warp's in a half, from the lane that has it.
__device__ __forceinline__ std::int32_t slot_of(std::int32_t slots, std::uint32_t half, std::uint32_t entry) {
  return __shfl_sync(kAllLanes, slots, static_cast<int>(half * kWarpEntries + entry));
}

/// Brings the warp's rows of a half into the L2 cache, a line each of a row's four lanes.
template <RowFormat kFormat>
__device__ __forceinline__ void prefetch_rows(const std::byte* pool, std::int32_t slots, std::uint32_t half) {
  constexpr std::uint32_t kBytes = kFormat == RowFormat::fp8_656 ? kFp8RowBytes : kBf16RowBytes;
  const std::uint32_t lane = gatherer() % kWarp;
  const std::byte* row = row_address(pool, max(slot_of(slots, half, lane / 4), 0), kBytes);
#pragma unroll
  for (std::uint32_t first = 0; first < kBytes; first += 4 * ptx::kCacheLine) {
    ptx::prefetch(row + min(first + lane % 4 * ptx::kCacheLine, kBytes - 1));
  }
}

/// Latents of a warp's entries of a half once more, element by element.
__device__ __forceinline__ void store_exactly(const std::byte* pool, std::int32_t slots, std::uint32_t half,
                                              std::uint32_t to) {
#pragma unroll 1
  for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
    const std::int32_t slot = slot_of(slots, half, i);
    if (slot == kNone) {
      continue;
    }
    const std::byte* row = row_address(pool, slot, kFp8RowBytes);
#pragma unroll 1
    for (std::uint32_t column = gatherer() % kWarp * 2; column < kLatent; column += 2 * kWarp) {
      const std::uint32_t codes = *reinterpret_cast<const std::uint16_t*>(row + column);
      const std::uint32_t pair = convert(codes, float_of(fp8_scale(row, column / kFp8Group)));
      const std::uint32_t place = chunk_place(gatherer() / kWarp * kWarpEntries + i, column % 64 / 8) + column % 8 * 2;
      ptx::store_shared(to + column / 64 * kAtomBytes + place, pair);
    }
  }
}

/// What is on its way of a warp's FP8 rows of a half: a lane's latents of each row, and a scale.
class Fp8Rows {
 public:
  /// Waits for the loads; returns whether unpack() gets all of them right. Before there is a place for them: codes that
  /// are not looked at once they are unpacked leave their registers to what is stored next, which would wait until the
  /// stores before have read theirs. `nan`: some may be NaN.
  __device__ __forceinline__ bool usual(bool nan) const {
    std::uint32_t marks[2] = {is_usual_scale(scales_) ? 0U : kNanMarks, 0U};
    if (nan) [[unlikely]] {
#pragma unroll
      for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
        marks[i % 2] |= nan_marks(codes_[i]);
      }
    }
    return __all_sync(kAllLanes, ((marks[0] | marks[1]) & kNanMarks) == 0U);
  }

 protected:
  static constexpr std::uint32_t kRopeLoads = kWarpEntries / 4;  ///< of four entries each

  __device__ __forceinline__ explicit Fp8Rows(const std::byte* pool) : pool_(pool) {}

  /// Slot of the lane's entry of a half.
  static __device__ __forceinline__ std::int32_t own_slot(std::int32_t slots, std::uint32_t half) {
    return slot_of(slots, half, gatherer() % kWarpEntries);
  }
  __device__ __forceinline__ void start_scales(std::int32_t own) {
    const std::uint32_t group = gatherer() % kWarp / kWarpEntries;
    scales_ = *reinterpret_cast<const std::uint32_t*>(part(own, kFp8Scales) + group * 4);
  }
  /// Part of a row; zeros if there is none.
  __device__ __forceinline__ const std::byte* part(std::int32_t slot, std::uint32_t offset) const {
    return slot == kNone ? reinterpret_cast<const std::byte*>(kNothing)
                         : row_address(pool_, slot, kFp8RowBytes) + offset;
  }
  /// Where the lane's rope part of the first four entries goes, of a half at `to`; that of the others: rope_place.
  static __device__ __forceinline__ std::uint32_t first_rope_place(std::uint32_t to) {
    const std::uint32_t lane = gatherer() % kWarp;
    const std::uint32_t entry = gatherer() / kWarp * kWarpEntries + lane / 8;
    return to + kRopeOffset + entry * 128 + ((lane % 8 ^ lane / 8) << 4);
  }
  static __device__ __forceinline__ std::uint32_t rope_place(std::uint32_t first, std::uint32_t i) {
    return (first ^ i << 6) + i * 512;
  }

  /// Unpacks latents to where they belong. A lane's 16 are chunks 2 (lane % 4) + {0, 1} of atom lane / 4: neighbouring
  /// atoms take turns.
  class Unpacking {
   public:
    /// Of a half at `to`, lanes having a scale each.
    __device__ __forceinline__ Unpacking(std::uint32_t scales, std::uint32_t to)
        : factors_(unpack_factor(scales)), first_(turn() != 0), second_(turn() == 0) {
      const std::uint32_t lane = gatherer() % kWarp;
      place_ = to + gatherer() / kWarp * kWarpEntries * 128 + lane / 4 * kAtomBytes + ((lane & 3U) << 5 | turn() << 4);
    }
    __device__ __forceinline__ void store(std::uint32_t i, const uint4& codes) const {
      const std::uint32_t factor = __shfl_sync(kAllLanes, factors_, static_cast<int>(i), kWarpEntries);
      const std::uint32_t place = place_ ^ i << 4;  // the row's number ends with `i`
      ptx::store_shared(place + i * 128, unpack(codes, first_, factor));
      ptx::store_shared((place ^ 16U) + i * 128, unpack(codes, second_, factor));
    }

   private:
    static __device__ __forceinline__ std::uint32_t turn() { return gatherer() % kWarp / 4 % 2; }

    std::uint32_t factors_;
    Order first_;
    Order second_;
    std::uint32_t place_;
  };

  const std::byte* pool_;
  uint4 codes_[kWarpEntries];
  std::uint32_t scales_;  ///< lane l's is of entry l % 8, group l / 8
};

template <>
class Gather<RowFormat::fp8_656> : public Fp8Rows {
 public:
  __device__ __forceinline__ explicit Gather(const std::byte* pool) : Fp8Rows(pool) {}

  /// Starts the loads of a half of the tile whose slots the lanes have.
  __device__ __forceinline__ void start(std::int32_t slots, std::uint32_t half) {
    const std::int32_t own = own_slot(slots, half);
    start_scales(own);
#pragma unroll
    for (std::uint32_t i = 0; i < kRopeLoads; ++i) {
      rope_[i] = ptx::load(rope_of(own, i));
    }
    // Latents where there is no row are another's, to be taken times a scale of 0: one base for all takes fewer
    // instructions than a choice for each.
    const std::int32_t some = __reduce_max_sync(kAllLanes, own);
    const std::int32_t rows = own == kNone ? max(some, 0) : own;
    const std::byte* base =
        (some == kNone ? reinterpret_cast<const std::byte*>(kNothing) : pool_) + gatherer() % kWarp * 16;
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
      codes_[i] = ptx::load(row_address(base, slot_of(rows, 0, i), kFp8RowBytes));
    }
  }

  /// Stores that half, its first row in the first atom at `to`.
  __device__ __forceinline__ void store(bool usual, std::uint32_t to, std::int32_t slots, std::uint32_t half) {
    const std::uint32_t rope = first_rope_place(to);
#pragma unroll
    for (std::uint32_t i = 0; i < kRopeLoads; ++i) {
      ptx::store_shared(rope_place(rope, i), rope_[i]);
    }
    const Unpacking unpacking(scales_, to);
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
      unpacking.store(i, codes_[i]);
    }
    if (!usual) {
      __syncwarp();  // the right values come last
      store_exactly(pool_, slots, half, to);
    }
  }
  /// Waits until what was stored is there.
  __device__ __forceinline__ void finish() const {}

 private:
  /// The lane's rope parts, of four entries at a time.
  __device__ __forceinline__ const std::byte* rope_of(std::int32_t own, std::uint32_t i) const {
    const std::uint32_t lane = gatherer() % kWarp;
    return part(slot_of(own, 0, 4 * i + lane / 8), kFp8Scales + 16) + lane % 8 * 16;
  }

  uint4 rope_[kRopeLoads];
};

template <>
class Gather<RowFormat::bf16_1152> {
 public:
  __device__ __forceinline__ explicit Gather(const std::byte* pool) : pool_(pool) {}

  __device__ __forceinline__ void start(std::int32_t /*slots*/, std::uint32_t /*half*/) {}
  __device__ __forceinline__ bool usual(bool /*nan*/) const { return true; }

  __device__ __forceinline__ void store(bool /*usual*/, std::uint32_t to, std::int32_t slots, std::uint32_t half) {
    const std::uint32_t chunk = gatherer() % 8;  // eight lanes have a row
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; i += kWarp / 8) {
      const std::uint32_t row = i + gatherer() % kWarp / 8;
      const std::int32_t slot = slot_of(slots, half, row);
      // The source of an entry that is not there is not read, but has to be an address.
      const std::byte* from = row_address(pool_, slot == kNone ? 0 : slot, kBf16RowBytes) + chunk * 16;
      const std::uint32_t place = to + chunk_place(gatherer() / kWarp * kWarpEntries + row, chunk);
#pragma unroll
      for (std::uint32_t atom = 0; atom < kAtoms; ++atom) {
        ptx::copy_async(place + atom * kAtomBytes, from + atom * 128, slot != kNone);
      }
    }
  }
  /// Waits until what was stored is there.
  __device__ __forceinline__ void finish() const { ptx::wait_copies(); }

 private:
  const std::byte* pool_;
};

}  // namespace echo::mla
