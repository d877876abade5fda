#pragma once
// Rows of a selection into a tile, by two warpgroups whose warps work for themselves: slots are read, and rows brought
// into the second-level cache, two tiles ahead; rows are loaded a half ahead, while there is no place for them yet.
//
// Warp w of the eight has entries 8 w to 8 w + 7 of each half; its lanes i and i + 16 have the slot of entry i % 8 of
// half i / 8. FP8 rows go through registers: a lane has ten pieces of 16 bytes in flight (41 KB per block), then
// unpacks and stores them. A load is the latents of one row: a quarter of a warp reads 128 bytes of it, where those of
// two rows would be twice as many requests. BF16 rows are copied as they are.

#include <cstddef>
#include <cstdint>

#include "cache_manager/address.hpp"
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

/// Brings the warp's rows of a tile into the second-level cache; rows begin at multiples of 16 bytes. One lane does it
/// for all: the instruction takes its address from registers that a warp has once, and lanes would do it in turns.
template <RowFormat kFormat>
__device__ __forceinline__ void prefetch_rows(const std::byte* pool, std::int32_t slots) {
  constexpr std::uint32_t kBytes = kFormat == RowFormat::fp8_656 ? kFp8RowBytes : kBf16RowBytes;
  std::int32_t all[kWarpSlots];
#pragma unroll
  for (std::uint32_t i = 0; i < kWarpSlots; ++i) {
    all[i] = __shfl_sync(kAllLanes, slots, static_cast<int>(i));
  }
  if (ptx::elect()) {
#pragma unroll
    for (const std::int32_t slot : all) {
      if (slot != kNone) {
        ptx::prefetch(row_address(pool, slot, kBytes), kBytes);
      }
    }
  }
}

template <RowFormat kFormat>
class Gather;

inline constexpr std::uint32_t kFp8Scales = kLatent;              ///< offset of the scales in a row
inline constexpr std::uint32_t kFp8Scaled = kLatent / kFp8Group;  ///< how many

inline constexpr std::uint64_t kMarkOfHalf = 0x0101010101010101ULL;  ///< 0, and shifted by 1 of half 1

/// What is read for entries without a row: with an address for every load, none has to be predicated and then merged
/// with zeros, which would wait for it.
__device__ const uint4 kNoRow[kFp8RowBytes / sizeof(uint4)] = {};

__device__ __forceinline__ const std::byte* fp8_row(const std::byte* pool, std::int32_t slot) {
  return slot == kNone ? reinterpret_cast<const std::byte*>(kNoRow) : row_address(pool, slot, kFp8RowBytes);
}
__device__ __forceinline__ std::uint32_t fp8_scale(const std::byte* row, std::uint32_t group) {
  return *reinterpret_cast<const std::uint32_t*>(row + kFp8Scales + group * 4);
}

/// Slot of entry `entry` of the warp's in a half, from the lane that has it.
__device__ __forceinline__ std::int32_t slot_of(std::int32_t slot, std::uint32_t half, std::uint32_t entry) {
  return __shfl_sync(kAllLanes, slot, static_cast<int>(half * kWarpEntries + entry));
}

/// Latents of a warp's entries of a half once more, element by element.
__device__ __forceinline__ void store_exactly(const std::byte* pool, std::int32_t slots, std::uint32_t half,
                                              std::uint32_t to) {
#pragma unroll 1
  for (std::uint32_t i = 0; i < kWarpEntries; ++i) {
    const std::int32_t slot = slot_of(slots, half, i);
    const std::uint32_t entry = gatherer() / kWarp * kWarpEntries + i;
    if (slot == kNone) {
      continue;
    }
    const std::byte* row = fp8_row(pool, slot);
#pragma unroll 1
    for (std::uint32_t column = gatherer() % kWarp * 2; column < kLatent; column += 2 * kWarp) {
      const std::uint32_t codes = *reinterpret_cast<const std::uint16_t*>(row + column);
      const std::uint32_t pair = convert(codes, float_of(fp8_scale(row, column / kFp8Group)));
      const std::uint32_t place = chunk_place(entry, column % 64 / 8) + column % 8 * 2;
      ptx::store_shared(to + column / 64 * kAtomBytes + place, pair);
    }
  }
}

template <>
class Gather<RowFormat::fp8_656> {
 public:
  __device__ __forceinline__ explicit Gather(const std::byte* pool) : pool_(pool) {}

  /// Starts the loads of a half of the tile whose slots the lanes have.
  __device__ __forceinline__ void start(std::int32_t slots, std::uint32_t half) {
    const Lane lane;
    scales_ = fp8_scale(fp8_row(pool_, slot_of(slots, half, lane.index / kFp8Scaled)), lane.index % kFp8Scaled);
#pragma unroll
    for (std::uint32_t entry = 0; entry < kWarpEntries; ++entry) {
      codes_[entry] = ptx::load(fp8_row(pool_, slot_of(slots, half, entry)) + lane.index * 16);
    }
#pragma unroll
    for (std::uint32_t j = 0; j < kRopeLoads; ++j) {
      const std::byte* row = fp8_row(pool_, slot_of(slots, half, 4 * j + lane.eighth()));
      rope_[j] = ptx::load(row + kFp8Scales + 16 + (lane.index & 7U) * 16);
    }
  }

  /// Stores that half, its first row in the first atom at `to`.
  __device__ __forceinline__ void store(std::uint32_t to, std::int32_t slots, std::uint32_t half) {
    const Lane lane;
    const std::uint32_t factors = unpack_factor(scales_);
    std::uint32_t marks = is_usual_scale(scales_) ? 0U : kUnusual;
    const std::uint32_t rope =
        to + kRopeOffset + (lane.entry + lane.eighth()) * 128 + (((lane.index & 7U) ^ lane.eighth()) << 4);
#pragma unroll
    for (std::uint32_t j = 0; j < kRopeLoads; ++j) {
      ptx::store_shared((rope ^ j << 6) + j * 512, rope_[j]);
    }
    // A lane's 16 latents are chunks 2 (lane % 4) + {0, 1} of atom lane / 4: neighbouring atoms take turns.
    const std::uint32_t turn = lane.index / 4 % 2;
    const Order first(turn != 0);
    const Order second(turn == 0);
    const std::uint32_t latents =
        to + lane.entry * 128 + lane.index / 4 * kAtomBytes + ((lane.index & 3U) << 5 | turn << 4);
#pragma unroll
    for (std::uint32_t entry = 0; entry < kWarpEntries; ++entry) {
      const std::uint32_t scale = entry * kFp8Scaled + lane.eighth();
      const std::uint32_t factor = __shfl_sync(kAllLanes, factors, static_cast<int>(scale));
      const std::uint32_t place = latents ^ entry << 4;  // the row's number ends with `entry`
      marks |= nan_marks(codes_[entry]);
      ptx::store_shared(place + entry * 128, unpack(codes_[entry], first, factor));
      ptx::store_shared((place ^ 16U) + entry * 128, unpack(codes_[entry], second, factor));
    }
    if (!__all_sync(kAllLanes, is_usual(marks))) {
      __syncwarp();  // the right values come last
      store_exactly(pool_, slots, half, to);
    }
  }

  /// Waits until what was stored is there.
  __device__ __forceinline__ void finish() const {}

 private:
  static constexpr std::uint32_t kRopeLoads = kWarpEntries / 4;  ///< of four entries each

  /// Which lane this is, found out anew for each half: what follows from it takes fewer instructions than registers.
  struct Lane {
    std::uint32_t index;
    std::uint32_t entry;  ///< the warp's first of a half

    __device__ __forceinline__ Lane() {
      const std::uint32_t thread = gatherer();
      index = thread % kWarp;
      entry = thread / kWarp * kWarpEntries;
    }
    __device__ __forceinline__ std::uint32_t eighth() const { return index / 8; }
  };

  const std::byte* pool_;
  uint4 codes_[kWarpEntries];
  uint4 rope_[kRopeLoads];
  std::uint32_t scales_;
};

template <>
class Gather<RowFormat::bf16_1152> {
 public:
  __device__ __forceinline__ explicit Gather(const std::byte* pool) : pool_(pool) {}

  __device__ __forceinline__ void start(std::int32_t /*slots*/, std::uint32_t /*half*/) {}

  __device__ __forceinline__ void store(std::uint32_t to, std::int32_t slots, std::uint32_t half) {
    const std::uint32_t chunk = gatherer() % 8;  // eight lanes have a row
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpEntries; i += kWarp / 8) {
      const std::uint32_t entry = i + gatherer() % kWarp / 8;
      const std::int32_t slot = slot_of(slots, half, entry);
      // The source of an entry that is not there is not read, but has to be an address.
      const std::byte* from = row_address(pool_, slot == kNone ? 0 : slot, kBf16RowBytes) + chunk * 16;
      const std::uint32_t place = to + chunk_place(gatherer() / kWarp * kWarpEntries + entry, chunk);
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
  if (lane_index() == 0) {
    reinterpret_cast<std::uint8_t*>(&shared.entries[half])[gatherer() / kWarp] = static_cast<std::uint8_t>(there);
  }
  __syncwarp();
  if (lane_index() == 0) {
    shared.full[half].arrive();
  }
}

/// The gathering warpgroups.
template <RowFormat kFormat>
__device__ __forceinline__ void gather(const AttendParams& p, const Work& work, const Split& split,
                                       const Stretch& stretch, Shared& shared, const KernelErrorView& errors) {
  // The slot, if it is one; tells the other warps in which halves of tile number `tile` this one has rows.
  const auto checked = [&](std::int32_t slot, std::uint32_t tile) {
    if (slot != kNone && (slot < 0 || slot >= p.layer.slots)) {
      errors.raise(KernelError::bad_slot);
      slot = kNone;
    }
    const std::uint32_t there = __ballot_sync(kAllLanes, slot != kNone);
    if (lane_index() == 0) {
      reinterpret_cast<std::uint8_t*>(&shared.marks[tile % kMarks])[gatherer() / kWarp] =
          static_cast<std::uint8_t>(((there & 0xFFU) != 0 ? 1U : 0U) | ((there & 0xFF00U) != 0 ? 2U : 0U));
    }
    return slot;
  };
  Gather<kFormat> rows(p.layer.pool);
  Place ahead(p, work, split, stretch, stretch.first_item());  // of which slots are requested
  std::int32_t slots = request_slot(p.slots, ahead);
  ahead.advance(p, work, split, stretch);
  std::int32_t coming = request_slot(p.slots, ahead);
  slots = checked(slots, 0);
  rows.start(slots, 0);
  prefetch_rows<kFormat>(p.layer.pool, slots);
  coming = checked(coming, 1);
  prefetch_rows<kFormat>(p.layer.pool, coming);
  meet_aligned(kGatherBarrier, kGatherers);  // what the warps told of the first tiles; later, full and empty are enough
  const auto tiles = static_cast<std::uint32_t>(__shfl_sync(kAllLanes, stretch.length, 0));
#pragma unroll 1
  for (std::uint32_t tile = 0; tile < tiles; ++tile) {
    ahead.advance(p, work, split, stretch);
    const std::int32_t later = request_slot(p.slots, ahead);
    shared.empty[0].wait(~tile & 1U);
    const std::uint64_t marks = shared.marks[tile % kMarks];
    const bool any[kHalves] = {(marks & kMarkOfHalf) != 0, (marks & kMarkOfHalf << 1) != 0};
    if (any[0]) {
      rows.store(ptx::shared_address(shared.rows[0]), slots, 0);
      rows.finish();
    }
    show_half(0, slots, shared);
    if (any[1]) {
      rows.start(slots, 1);
    }
    shared.empty[1].wait(~tile & 1U);
    if (any[1]) {
      rows.store(ptx::shared_address(shared.rows[1]), slots, 1);
      rows.finish();
    }
    show_half(1, slots, shared);
    // What follows passes while the consumers are at the two halves.
    slots = coming;
    rows.start(slots, 0);
    coming = checked(later, tile + 2);
    prefetch_rows<kFormat>(p.layer.pool, coming);
  }
}

}  // namespace echo::mla
