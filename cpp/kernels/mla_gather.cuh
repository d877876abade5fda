#pragma once
// Rows of a selection into a tile, by two warpgroups whose warps work for themselves: slots are read, and rows brought
// into the second-level cache, two tiles ahead; rows are loaded a half ahead, while there is no place for them yet.
//
// Warp w of the eight has entries 8 w to 8 w + 7 of each half; its lanes i and i + 16 have the slot of entry i % 8 of
// half i / 8. FP8 rows go through registers: a lane has ten pieces of 16 bytes in flight (41 KB per block), then
// unpacks and stores them. The next loads follow the fence, which would wait for them. In a load of latents, lanes 0-3,
// 8-11,
// ... read a quarter row's pieces of one entry and the others those of the next: the two entries' stores then fall into
// different banks. BF16 rows are copied as they are.

#include <cstddef>
#include <cstdint>

#include "cache_manager/address.hpp"
#include "kernels/kernel_errors.hpp"
#include "kernels/mla_tile.cuh"
#include "kernels/mla_unpack.cuh"
#include "kernels/mla_work.cuh"
#include "kernels/params.hpp"
#include "kernels/ptx/copy.cuh"

namespace echo::mla {

inline constexpr std::uint32_t kWarpEntries = kHalf / kGatherWarps;  ///< of a warp, in a half
inline constexpr std::uint32_t kWarpSlots = kTile / kGatherWarps;    ///< a lane and the one 16 further have the same
static_assert(kWarpEntries == 8 && kWarpSlots == kWarp / 2);

/// Which of the gathering threads this is, read anew: what follows from it takes fewer instructions than registers.
__device__ __forceinline__ std::uint32_t gatherer() { return ptx::thread_anew() - kConsumers; }

/// Slots of a tile, of which `count` exist.
struct TileSlots {
  const std::int32_t* slots;
  std::int32_t count;
};

__device__ const std::int32_t kNoSlot = kNone;

/// Starts to load the lane's slot of a tile: kNone where it does not exist.
__device__ __forceinline__ std::int32_t request_slot(const TileSlots& tile) {
  const std::uint32_t lane = gatherer() % kWarpSlots;
  const std::uint32_t entry = lane / kWarpEntries * kHalf + gatherer() / kWarp * kWarpEntries + lane % kWarpEntries;
  return ptx::load_word(static_cast<std::int32_t>(entry) < tile.count ? tile.slots + entry : &kNoSlot);
}

/// Brings a row into the second-level cache; rows begin at multiples of 16 bytes. Of its lines, a lane brings one half
/// and the lane that has the same slot the other.
template <RowFormat kFormat>
__device__ __forceinline__ void prefetch_row(const std::byte* pool, std::int32_t slot) {
  constexpr std::int64_t kBytes = kFormat == RowFormat::fp8_656 ? kFp8RowBytes : kBf16RowBytes;
  constexpr std::int64_t kLines = (kBytes + 2 * ptx::kCacheLine - 17) / ptx::kCacheLine;  // that a row may touch
  static_assert(kLines % 2 == 0);
  if (slot != kNone) {
    const std::byte* row = row_address(pool, slot, kBytes);
    const std::int64_t first = gatherer() % kWarp < kWarpSlots ? 0 : kLines / 2;
#pragma unroll
    for (std::int64_t line = 0; line < kLines / 2; ++line) {
      ptx::prefetch(row + min((first + line) * ptx::kCacheLine, kBytes - 1));
    }
  }
}

template <RowFormat kFormat>
class Gather;

inline constexpr std::uint32_t kFp8Scales = kLatent;  ///< offset of the scales in a row

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
    for (auto column = static_cast<std::uint32_t>(lane_index()) * 2; column < kLatent; column += 2 * kWarp) {
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
    scales_ = fp8_scale(fp8_row(pool_, slot_of(slots, half, lane.index / 4)), lane.index & 3U);
#pragma unroll
    for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
      const std::byte* row = fp8_row(pool_, slot_of(slots, half, 2 * pair + lane.odd()));
      const std::byte* from = row + (lane.index & 3U) * 16 + lane.eighth() * 64;
      codes_[pair][0] = ptx::load(from);
      codes_[pair][1] = ptx::load(from + kLatent / 2);
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
    std::uint32_t marks = 0;
    const std::uint32_t latents =
        to + (lane.entry + lane.odd()) * 128 + lane.eighth() * kAtomBytes + ((lane.index & 3U) << 5 | lane.odd() << 4);
#pragma unroll
    for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
      // Chunk 2 (lane % 4) + {0, 1} of a row whose number ends with 2 pair + odd.
      const std::uint32_t place = latents ^ pair << 5;
#pragma unroll
      for (std::uint32_t side = 0; side < 2; ++side) {
        const std::uint32_t scale = (2 * pair + lane.odd()) * 4 + 2 * side + lane.index / 16;
        const Unpacked values(codes_[pair][side], __shfl_sync(kAllLanes, factors, static_cast<int>(scale)));
        marks |= nan_marks(codes_[pair][side]);
        const std::uint32_t offset = pair * 256 + side * 4 * kAtomBytes;
        ptx::store_shared(place + offset, values.first);
        ptx::store_shared((place ^ 16U) + offset, values.second);
      }
    }
    const std::uint32_t rope =
        to + kRopeOffset + (lane.entry + lane.eighth()) * 128 + (((lane.index & 7U) ^ lane.eighth()) << 4);
#pragma unroll
    for (std::uint32_t j = 0; j < kRopeLoads; ++j) {
      ptx::store_shared((rope ^ j << 6) + j * 512, rope_[j]);
    }
    if (!__all_sync(kAllLanes, is_usual_scale(scales_) && !has_nan(marks))) {
      __syncwarp();  // the right values come last
      store_exactly(pool_, slots, half, to);
    }
  }

  /// Waits until what was stored is there.
  __device__ __forceinline__ void finish() const {}

 private:
  static constexpr std::uint32_t kPairs = kWarpEntries / 2;      ///< of entries, of a warp and half
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
    /// Which entry of a pair the lane has.
    __device__ __forceinline__ std::uint32_t odd() const { return index / 4 % 2; }
    __device__ __forceinline__ std::uint32_t eighth() const { return index / 8; }
  };

  const std::byte* pool_;
  uint4 codes_[kPairs][2];
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

/// Shows the consumers what the warp has of a half, which has been stored.
__device__ __forceinline__ void show_half(std::uint32_t half, std::int32_t slots, Shared& shared) {
  const std::uint32_t there = __ballot_sync(kAllLanes, slots != kNone) >> (half * kWarpEntries);
  if (lane_index() == 0) {
    reinterpret_cast<std::uint8_t*>(&shared.entries[half])[gatherer() / kWarp] = static_cast<std::uint8_t>(there);
  }
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane_index() == 0) {
    shared.full[half].arrive();
  }
}

/// The gathering warpgroups.
template <RowFormat kFormat>
__device__ __forceinline__ void gather(const AttendParams& p, const Work& work, const Split& split, std::int32_t first,
                                       Shared& shared, const KernelErrorView& errors) {
  const auto next_of = [&](Place place) { return place.next(work, split.tiles); };
  const auto request = [&](Place place) {
    // Of an item that does not exist none are read, but they have to have an address.
    const bool real = place.item < work.items;
    const std::int64_t row = real ? work.row(place.item) : 0;
    return request_slot({p.slots + row * p.shape.top_k + split.begin + place.tile * kTile,
                         real ? split.count - place.tile * kTile : 0});
  };
  // The slot, if it is one; tells the other warps whether this one has a row in tile number `tile`.
  const auto checked = [&](std::int32_t slot, std::uint32_t tile) {
    if (slot != kNone && (slot < 0 || slot >= p.layer.slots)) {
      errors.raise(KernelError::bad_slot);
      slot = kNone;
    }
    const bool any = __any_sync(kAllLanes, slot != kNone);
    if (lane_index() == 0) {
      reinterpret_cast<std::uint8_t*>(&shared.marks[tile % kMarks])[gatherer() / kWarp] = any ? 1 : 0;
    }
    return slot;
  };
  Gather<kFormat> rows(p.layer.pool);
  Place place{first, 0};
  std::int32_t slots = request(place);
  std::int32_t coming = request(next_of(place));
  slots = checked(slots, 0);
  rows.start(slots, 0);
  prefetch_row<kFormat>(p.layer.pool, slots);
  coming = checked(coming, 1);
  prefetch_row<kFormat>(p.layer.pool, coming);
  meet_aligned(kGatherBarrier, kGatherers);  // what the warps told of the first tiles; later, full and empty are enough
  ptx::cluster_wait();  // not earlier: no other block has anything to do with what this one gathers
  std::uint32_t item_parity = 0;
  for (std::uint32_t tile = 0; place.item < work.items; ++tile) {
    const std::int32_t later = request(next_of(next_of(place)));
    shared.empty[0].wait(~tile & 1U);
    const bool any = shared.marks[tile % kMarks] != 0;
    if (any) {
      rows.store(ptx::shared_address(shared.rows[0]), slots, 0);
      rows.finish();
    }
    show_half(0, slots, shared);
    if (any) {
      rows.start(slots, 1);
    }
    shared.empty[1].wait(~tile & 1U);
    if (place.tile == 0) {  // where the sums of the last item were, if there is one
      shared.drained.wait(item_parity ^ 1U);
    }
    if (any) {
      rows.store(ptx::shared_address(shared.rows[1]), slots, 1);
      rows.finish();
    }
    show_half(1, slots, shared);
    // What follows passes while the consumers are at the two halves.
    place = next_of(place);
    slots = coming;
    rows.start(slots, 0);
    coming = checked(later, tile + 2);
    prefetch_row<kFormat>(p.layer.pool, coming);
    item_parity ^= place.tile == 0 ? 1U : 0U;
  }
}

}  // namespace echo::mla
