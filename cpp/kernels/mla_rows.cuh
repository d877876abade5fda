#pragma once
// A gathering warp's rows of a half: loaded, unpacked and stored where the tensor cores read them (mla_tile.cuh).
//
// Warp w of the eight has entries 8 w to 8 w + 7 of each half; its lanes i and i + 16 have the slot of entry i % 8 of
// half i / 8. FP8 rows go through registers: a lane has ten pieces of 16 bytes in flight (41 KB per block), then
// unpacks and stores them. A load is the latents of one row: a quarter of a warp reads 128 bytes of it, where those of
// two rows would be twice as many requests. BF16 rows are copied as they are. Cost of a half, for a warp on an H200:
// 300 to 500 cycles to start loads, 1,500 to 2,000 until they are there, 1,200 to 1,400 to unpack and store.
//
// Where selections are one split (kWhole), a row of the next half is loaded as soon as its registers are free, and rope
// parts are copied: a warp waits 85 cycles for loads, and 2,500 to store, since stores wait while the logits' operands
// fill shared memory. A call takes less with the 32 halves of 2,048 entries, more with few.

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

/// A half's rows, on their way. `kWhole`: loads of the next half are behind the stores that free their registers.
template <RowFormat kFormat, bool kWhole>
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

/// Latents of a warp's entries of a half; where there is no row those of another, to be taken times a scale of 0: one
/// base for all takes fewer instructions than a choice for each.
template <bool kWhole>
class Latents {
 public:
  Latents() = default;
  /// `own`: slot of the lane's entry.
  __device__ __forceinline__ Latents(const std::byte* pool, std::int32_t own) {
    if constexpr (kWhole) {  // all the half's time counts: the pool's first row
      rows_ = max(own, 0);
      base_ = pool + gatherer() % kWarp * 16;
      asm volatile("" : "+l"(base_));  // else it is added up anew for each row
    } else {
      const std::int32_t some = __reduce_max_sync(kAllLanes, own);
      rows_ = own == kNone ? max(some, 0) : own;
      base_ = (some == kNone ? reinterpret_cast<const std::byte*>(kNothing) : pool) + gatherer() % kWarp * 16;
    }
  }
  /// Starts to load the lane's of an entry.
  __device__ __forceinline__ uint4 load(std::uint32_t entry) const {
    return ptx::load(row_address(base_, slot_of(rows_, 0, entry), kFp8RowBytes));
  }

 private:
  const std::byte* base_ = nullptr;
  std::int32_t rows_ = 0;
};

template <bool kWhole>
class Gather<RowFormat::fp8_656, kWhole> {
 public:
  __device__ __forceinline__ explicit Gather(const std::byte* pool) : pool_(pool) {}

  /// Starts the loads of a half of the tile whose slots the lanes have.
  __device__ __forceinline__ void start(std::int32_t slots, std::uint32_t half) {
    const std::int32_t own = own_slot(slots, half);
    start_scales(own);
    if constexpr (!kWhole) {
#pragma unroll
      for (std::uint32_t i = 0; i < kRopeLoads; ++i) {
        rope_[i] = ptx::load(rope_of(own, i));
      }
    }
    const Latents<kWhole> latents(pool_, own);
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
      codes_[i] = latents.load(i);
    }
  }

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

  /// Stores that half, its first row in the first atom at `to`. With kWhole it starts the loads of the next half, whose
  /// slots are in `next`: of each row as soon as its registers are free.
  __device__ __forceinline__ void store(bool usual, std::uint32_t to, std::int32_t slots, std::uint32_t half,
                                        std::int32_t next) {
    const std::uint32_t lane = gatherer() % kWarp;
    const std::uint32_t first_entry = gatherer() / kWarp * kWarpEntries;
    const std::uint32_t factors = unpack_factor(scales_);
    const std::uint32_t rope = to + kRopeOffset + (first_entry + lane / 8) * 128 + ((lane % 8 ^ lane / 8) << 4);
    Latents<kWhole> latents;  // of the next half
    if constexpr (kWhole) {
      const std::int32_t own = own_slot(slots, half);
#pragma unroll
      for (std::uint32_t i = 0; i < kRopeLoads; ++i) {
        const std::int32_t slot = slot_of(own, 0, 4 * i + lane / 8);
        const std::byte* from = row_address(pool_ + kFp8Scales + 16 + lane % 8 * 16, max(slot, 0), kFp8RowBytes);
        ptx::copy_async((rope ^ i << 6) + i * 512, from, slot != kNone);
      }
      const std::int32_t coming = own_slot(next, half ^ 1U);
      start_scales(coming);
      latents = Latents<kWhole>(pool_, coming);
    } else {
#pragma unroll
      for (std::uint32_t i = 0; i < kRopeLoads; ++i) {
        ptx::store_shared((rope ^ i << 6) + i * 512, rope_[i]);
      }
    }
    // A lane's 16 latents are chunks 2 (lane % 4) + {0, 1} of atom lane / 4: neighbouring atoms take turns.
    const std::uint32_t turn = lane / 4 % 2;
    const Order first(turn != 0);
    const Order second(turn == 0);
    const std::uint32_t place_of_latents =
        to + first_entry * 128 + lane / 4 * kAtomBytes + ((lane & 3U) << 5 | turn << 4);
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
      const std::uint32_t factor = __shfl_sync(kAllLanes, factors, static_cast<int>(i), kWarpEntries);
      const std::uint32_t place = place_of_latents ^ i << 4;  // the row's number ends with `i`
      ptx::store_shared(place + i * 128, unpack(codes_[i], first, factor));
      ptx::store_shared((place ^ 16U) + i * 128, unpack(codes_[i], second, factor));
      if constexpr (kWhole) {
        codes_[i] = latents.load(i);
        if (i + 1 < kWarpEntries) {
          __syncwarp();  // else the compiler gathers loads and addresses, for which there are no registers
        }
      }
    }
    if (!usual) {
      __syncwarp();  // the right values come last
      store_exactly(pool_, slots, half, to);
    }
  }

  /// Waits until what was stored is there.
  __device__ __forceinline__ void finish() const {
    if constexpr (kWhole) {
      ptx::wait_copies();
    }
  }

 private:
  static constexpr std::uint32_t kRopeLoads = kWarpEntries / 4;  ///< of four entries each

  /// Slot of the lane's entry of a half.
  static __device__ __forceinline__ std::int32_t own_slot(std::int32_t slots, std::uint32_t half) {
    return slot_of(slots, half, gatherer() % kWarpEntries);
  }
  __device__ __forceinline__ void start_scales(std::int32_t own) {
    const std::uint32_t group = gatherer() % kWarp / kWarpEntries;
    scales_ = *reinterpret_cast<const std::uint32_t*>(part(own, kFp8Scales) + group * 4);
  }
  /// The lane's rope parts, of four entries at a time.
  __device__ __forceinline__ const std::byte* rope_of(std::int32_t own, std::uint32_t i) const {
    const std::uint32_t lane = gatherer() % kWarp;
    return part(slot_of(own, 0, 4 * i + lane / 8), kFp8Scales + 16) + lane % 8 * 16;
  }
  /// Part of a row; zeros if there is none.
  __device__ __forceinline__ const std::byte* part(std::int32_t slot, std::uint32_t offset) const {
    return slot == kNone ? reinterpret_cast<const std::byte*>(kNothing)
                         : row_address(pool_, slot, kFp8RowBytes) + offset;
  }

  const std::byte* pool_;
  uint4 codes_[kWarpEntries];
  uint4 rope_[kWhole ? 1 : kRopeLoads];  ///< not with kWhole
  std::uint32_t scales_;                 ///< lane l's is of entry l % 8, group l / 8
};

template <>
class Gather<RowFormat::bf16_1152, false> {
 public:
  __device__ __forceinline__ explicit Gather(const std::byte* pool) : pool_(pool) {}

  __device__ __forceinline__ void start(std::int32_t /*slots*/, std::uint32_t /*half*/) {}
  __device__ __forceinline__ bool usual(bool /*nan*/) const { return true; }

  __device__ __forceinline__ void store(bool /*usual*/, std::uint32_t to, std::int32_t slots, std::uint32_t half,
                                        std::int32_t /*next*/) {
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
