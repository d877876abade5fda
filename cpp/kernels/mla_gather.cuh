#pragma once
// Rows of a selection into a tile, by two warpgroups whose warps work for themselves: slots are read a tile ahead, rows
// are loaded a half ahead, while there is no place for them yet.
//
// Warp w of the eight has entries 8 w to 8 w + 7 of each half; its lanes i and i + 16 have the slot of entry i % 8 of
// half i / 8. FP8 rows go through registers: a lane has ten pieces of 16 bytes in flight (41 KB per block), then
// unpacks and stores them. A load is the latents of one row: a quarter of a warp reads 128 bytes of it, where those of
// two rows would be twice as many requests. BF16 rows are copied as they are. Lines of the next half's rows are asked
// for before a half is stored. Cost of a half, for a warp on an H200: 300 to 500 cycles to start loads, 1,500 to 2,000
// until they are there, 1,200 to 1,400 to unpack and store.

#include <cstddef>
#include <cstdint>

#include "cache_manager/address.hpp"
#include "cache_manager/nan_codes.cuh"
#include "kernels/kernel_errors.hpp"
#include "kernels/mla_tile.cuh"
#include "kernels/mla_unpack.cuh"
#include "kernels/mla_work.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"
#include "kernels/ptx/tensor_copy.cuh"

namespace echo::mla {

inline constexpr std::uint32_t kWarpEntries = kHalf / kGatherWarps;  ///< of a warp, in a half
inline constexpr std::uint32_t kWarpSlots = kTile / kGatherWarps;    ///< a lane and the one 16 further have the same
static_assert(kWarpEntries == 8 && kWarpSlots == kWarp / 2);

/// Which of the gathering threads this is, read anew: what follows from it takes fewer instructions than registers.
__device__ __forceinline__ std::uint32_t gatherer() { return ptx::thread_anew() - kConsumers; }

__device__ const std::int32_t kNoSlot = kNone;

/// Starts to load the lane's slot of a tile: kNone where it does not exist.
__device__ __forceinline__ std::int32_t request_slot(const std::int32_t* slots, const Place& place) {
  const std::uint32_t lane = gatherer() % kWarpSlots;
  const std::uint32_t entry = lane / kWarpEntries * kHalf + gatherer() / kWarp * kWarpEntries + lane % kWarpEntries;
  return ptx::load_word(static_cast<std::int32_t>(entry) < place.count ? slots + place.first + entry : &kNoSlot);
}

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

template <>
class Gather<RowFormat::fp8_656> {
 public:
  __device__ __forceinline__ explicit Gather(const std::byte* pool) : pool_(pool) {}

  /// Starts the loads of a half of the tile whose slots the lanes have. The latents of an entry without a row are those
  /// of another of the warp's, times a scale of 0: one base for all takes fewer instructions than a choice for each.
  __device__ __forceinline__ void start(std::int32_t slots, std::uint32_t half) {
    const std::uint32_t lane = gatherer() % kWarp;
    const std::int32_t own = slot_of(slots, half, lane % kWarpEntries);
    scales_ = *reinterpret_cast<const std::uint32_t*>(part(own, kFp8Scales) + lane / kWarpEntries * 4);
#pragma unroll
    for (std::uint32_t i = 0; i < kRopeLoads; ++i) {
      rope_[i] = ptx::load(part(slot_of(own, 0, 4 * i + lane / 8), kFp8Scales + 16) + lane % 8 * 16);
    }
    const std::int32_t some = __reduce_max_sync(kAllLanes, own);
    const std::int32_t rows = own == kNone ? max(some, 0) : own;
    const std::byte* latents = (some == kNone ? reinterpret_cast<const std::byte*>(kNothing) : pool_) + lane * 16;
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
      codes_[i] = ptx::load(row_address(latents, slot_of(rows, 0, i), kFp8RowBytes));
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

  /// Stores that half, its first row in the first atom at `to`.
  __device__ __forceinline__ void store(bool usual, std::uint32_t to, std::int32_t slots, std::uint32_t half) {
    const std::uint32_t lane = gatherer() % kWarp;
    const std::uint32_t first_entry = gatherer() / kWarp * kWarpEntries;
    const std::uint32_t factors = unpack_factor(scales_);
    const std::uint32_t rope = to + kRopeOffset + (first_entry + lane / 8) * 128 + ((lane % 8 ^ lane / 8) << 4);
#pragma unroll
    for (std::uint32_t i = 0; i < kRopeLoads; ++i) {
      ptx::store_shared((rope ^ i << 6) + i * 512, rope_[i]);
    }
    // A lane's 16 latents are chunks 2 (lane % 4) + {0, 1} of atom lane / 4: neighbouring atoms take turns.
    const std::uint32_t turn = lane / 4 % 2;
    const Order first(turn != 0);
    const Order second(turn == 0);
    const std::uint32_t latents = to + first_entry * 128 + lane / 4 * kAtomBytes + ((lane & 3U) << 5 | turn << 4);
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
      const std::uint32_t factor = __shfl_sync(kAllLanes, factors, static_cast<int>(i), kWarpEntries);
      const std::uint32_t place = latents ^ i << 4;  // the row's number ends with `i`
      ptx::store_shared(place + i * 128, unpack(codes_[i], first, factor));
      ptx::store_shared((place ^ 16U) + i * 128, unpack(codes_[i], second, factor));
    }
    if (!usual) {
      __syncwarp();  // the right values come last
      store_exactly(pool_, slots, half, to);
    }
  }

  /// Waits until what was stored is there.
  __device__ __forceinline__ void finish() const {}

 private:
  static constexpr std::uint32_t kRopeLoads = kWarpEntries / 4;  ///< of four entries each

  /// Part of a row; zeros if there is none.
  __device__ __forceinline__ const std::byte* part(std::int32_t slot, std::uint32_t offset) const {
    return slot == kNone ? reinterpret_cast<const std::byte*>(kNothing)
                         : row_address(pool_, slot, kFp8RowBytes) + offset;
  }

  const std::byte* pool_;
  uint4 codes_[kWarpEntries];
  uint4 rope_[kRopeLoads];
  std::uint32_t scales_;  ///< lane l's is of entry l % 8, group l / 8
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

/// Shows the consumers what the warp has of a half, which has been stored. The fence that the tensor cores need is
/// theirs.
__device__ __forceinline__ void show_half(std::uint32_t half, std::int32_t slots, Shared& shared) {
  const std::uint32_t there = __ballot_sync(kAllLanes, slots != kNone) >> (half * kWarpEntries);
  __syncwarp();
  if (ptx::elect()) {
    reinterpret_cast<std::uint8_t*>(&shared.entries[half])[gatherer() / kWarp] = static_cast<std::uint8_t>(there);
    shared.full[half].arrive();
  }
}

/// The gathering warpgroups.
template <RowFormat kFormat>
__device__ __forceinline__ void gather(const AttendParams& p, const Work& work, const Split& split,
                                       const Stretch& stretch, Shared& shared, const KernelErrorView& errors) {
  // The slot, if it is one; tells the other warps which entries of a tile have rows.
  const auto checked = [&](std::int32_t slot, std::uint32_t tile) {
    if (slot != kNone && (slot < 0 || slot >= p.layer.slots)) {
      errors.raise(KernelError::bad_slot);
      slot = kNone;
    }
    const std::uint32_t there = __ballot_sync(kAllLanes, slot != kNone);
    if (lane_index() < kHalves) {
      reinterpret_cast<std::uint8_t*>(&shared.coming[tile % kComing][lane_index()])[gatherer() / kWarp] =
          static_cast<std::uint8_t>(there >> lane_index() * static_cast<int>(kWarpEntries));
    }
    return slot;
  };
  Gather<kFormat> rows(p.layer.pool);
  Place place(p, work, split, stretch, stretch.first_item());  // of which slots are requested
  std::int32_t slots = kNone;
  std::int32_t coming = request_slot(p.slots, place);
  const bool nan = kFormat == RowFormat::fp8_656 && may_have_nan(p.layer);
  const std::uint32_t halves = kHalves * static_cast<std::uint32_t>(__shfl_sync(kAllLanes, stretch.length, 0));
  // A turn stores a half, but the first one, and starts the loads of the next. All is once in the code, which has to be
  // fetched as it is run.
#pragma unroll 1
  for (std::uint32_t turn = 0;; ++turn) {
    const std::uint32_t half = (turn & 1U) ^ 1U;  // that is stored
    const std::uint32_t tile = (turn - 1) / 2;    // of that half
    if (half == 0 || turn == 0) {                 // before others can come to that tile: they wait for this half
      coming = checked(coming, (turn + 1) / 2);
    }
    const std::int32_t next = half == 0 ? slots : coming;
    prefetch_rows<kFormat>(p.layer.pool, next, half ^ 1U);
    if (turn > 0) {
      const bool usual = rows.usual(nan);
      shared.empty[half].wait(~tile & 1U);
      if (turn == 1) {
        meet_aligned(kGatherBarrier, kGatherers);  // what the warps told of the first tile; later, full and empty do
      }
      if (shared.coming[tile % kComing][half] != 0) {
        rows.store(usual, ptx::shared_address(shared.rows[half]), slots, half);
        rows.finish();
      }
      show_half(half, slots, shared);
    }
    if (turn == halves) {
      break;
    }
    rows.start(next, half ^ 1U);
    slots = next;
    if (half == 1) {
      place.advance(p, work, split, stretch);
      coming = request_slot(p.slots, place);
    }
  }
}

}  // namespace echo::mla
