#pragma once
// Rows of a selection into a tile, by two warpgroups: slots are read and rows brought into the second-level cache two
// tiles ahead, rows loaded a half ahead, while there is no place for them yet.
//
// Warp w of the eight has entries 8 w to 8 w + 7 of each half. FP8 rows go through registers: a lane has ten pieces of
// 16 bytes in flight (41 KB per block), then unpacks and stores them. The next loads follow the fence, which would wait
// for them. In a load of latents, lanes 0-3, 8-11, ... read a quarter row's pieces of one entry and the others those of
// the next: the two entries' stores then fall into different banks. BF16 rows are copied as they are.

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

/// The thread's entry of a tile.
__device__ __forceinline__ std::uint32_t slot_entry() {
  return gatherer() / kWarp * kWarpSlots + gatherer() % kWarpSlots;
}
/// Starts to bring the thread's slot of a tile to shared memory: a load into a register would be waited for with the
/// next rows.
__device__ __forceinline__ void request_slot(const TileSlots& tile, std::uint32_t ring, Shared& shared) {
  const std::uint32_t entry = slot_entry();
  const bool real = static_cast<std::int32_t>(entry) < tile.count;
  ptx::copy_word_async(ptx::shared_address(&shared.slots[ring][entry]), tile.slots + (real ? entry : 0), real);
}
/// The requested slot. Rows that still travel would be waited for here.
__device__ __forceinline__ std::int32_t requested_slot(const TileSlots& tile, std::uint32_t ring,
                                                       const LayerView& layer, const Shared& shared,
                                                       const KernelErrorView& errors) {
  ptx::wait_copies();
  const std::uint32_t entry = slot_entry();
  const std::int32_t slot = static_cast<std::int32_t>(entry) < tile.count ? shared.slots[ring][entry] : kNone;
  if (slot != kNone && (slot < 0 || slot >= layer.slots)) {
    errors.raise(KernelError::bad_slot);
    return kNone;
  }
  return slot;
}

/// Brings a row into the second-level cache; rows begin at multiples of 16 bytes.
template <RowFormat kFormat>
__device__ __forceinline__ void prefetch_row(const std::byte* pool, std::int32_t slot) {
  constexpr std::uint32_t kBytes = kFormat == RowFormat::fp8_656 ? kFp8RowBytes : kBf16RowBytes;
  if (slot != kNone && gatherer() % kWarp < kWarpSlots) {
    ptx::prefetch(row_address(pool, slot, kBytes), kBytes);
  }
}

/// Brings the slots from a tile on, to the end of the split, into the second-level cache.
__device__ __forceinline__ void prefetch_slots(const TileSlots& tile) {
  if (gatherer() == 0 && tile.count > 0) {
    ptx::prefetch(tile.slots, static_cast<std::uint32_t>(tile.count) * sizeof(std::int32_t));
  }
}

/// Shows all gathering threads the slots of a tile.
__device__ __forceinline__ void publish_slots(std::int32_t slot, std::uint32_t ring, Shared& shared) {
  const std::uint32_t warp = gatherer() / kWarp;
  shared.slots[ring][warp * kWarpSlots + gatherer() % kWarpSlots] = slot;
  const std::uint32_t entries = __ballot_sync(kAllLanes, slot != kNone);
  if (lane_index() == 0) {
    reinterpret_cast<std::uint16_t*>(shared.entries[ring])[warp] = static_cast<std::uint16_t>(entries);
  }
  meet_aligned(kGatherBarrier, kGatherers);
}

/// Whether a tile whose slots have been published has any row.
__device__ __forceinline__ bool has_entries(const Shared& shared, std::uint32_t ring) {
  return (shared.entries[ring][0] | shared.entries[ring][1]) != 0;
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

/// Latents of a warp's entries of a half once more, element by element.
__device__ __forceinline__ void store_exactly(const std::byte* pool, const std::int32_t* slots,
                                              std::uint32_t first_entry, std::uint32_t to) {
#pragma unroll 1
  for (std::uint32_t entry = first_entry; entry < first_entry + kWarpEntries; ++entry) {
    const std::int32_t slot = slots[entry];
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

  /// Starts the loads of a half.
  __device__ __forceinline__ void start(const std::int32_t* slots) {
    const Lane lane;
    scales_ = fp8_scale(fp8_row(pool_, slots[lane.entry + lane.index / 4]), lane.index & 3U);
#pragma unroll
    for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
      const std::byte* row = fp8_row(pool_, slots[lane.entry + 2 * pair + lane.odd()]);
      const std::byte* from = row + (lane.index & 3U) * 16 + lane.eighth() * 64;
      codes_[pair][0] = ptx::load(from);
      codes_[pair][1] = ptx::load(from + kLatent / 2);
    }
#pragma unroll
    for (std::uint32_t j = 0; j < kRopeLoads; ++j) {
      const std::byte* row = fp8_row(pool_, slots[lane.entry + 4 * j + lane.eighth()]);
      rope_[j] = ptx::load(row + kFp8Scales + 16 + (lane.index & 7U) * 16);
    }
  }

  /// Stores the half of these slots, its first row in the first atom at `to`.
  __device__ __forceinline__ void store(std::uint32_t to, const std::int32_t* slots) {
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
      store_exactly(pool_, slots, lane.entry, to);
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

  __device__ __forceinline__ void start(const std::int32_t* /*slots*/) {}

  __device__ __forceinline__ void store(std::uint32_t to, const std::int32_t* slots) {
    const std::uint32_t chunk = gatherer() % 8;  // eight threads have a row
#pragma unroll
    for (std::uint32_t entry = gatherer() / 8, i = 0; i < kHalf * 8 / kGatherers; ++i, entry += kGatherers / 8) {
      const std::int32_t slot = slots[entry];
      // The source of an entry that is not there is not read, but has to be an address.
      const std::byte* from = row_address(pool_, slot == kNone ? 0 : slot, kBf16RowBytes) + chunk * 16;
      const std::uint32_t place = to + chunk_place(entry, chunk);
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

/// Shows the consumers a half that has been stored.
__device__ __forceinline__ void show_half(std::uint32_t half, std::uint32_t ring, Shared& shared) {
  if (threadIdx.x == kConsumers) {
    shared.present[half] = {shared.entries[ring][half], has_entries(shared, ring) ? 1U : 0U};
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
  const auto slots_of = [&](Place place) {
    // Of an item that does not exist none are read, but they have to have an address.
    const bool real = place.item < work.items;
    const std::int64_t row = real ? work.row(place.item) : 0;
    return TileSlots{p.slots + row * p.shape.top_k + split.begin + place.tile * kTile,
                     real ? split.count - place.tile * kTile : 0};
  };
  const auto next_of = [&](Place place) { return place.next(work, split.tiles); };
  // Shows all what has been requested of a tile; returns the thread's slot.
  const auto publish = [&](Place place, std::uint32_t ring) {
    const std::int32_t slot = requested_slot(slots_of(place), ring, p.layer, shared, errors);
    publish_slots(slot, ring, shared);
    return slot;
  };
  Gather<kFormat> rows(p.layer.pool);
  Place place{first, 0};
  request_slot(slots_of(place), 0, shared);
  request_slot(slots_of(next_of(place)), 1, shared);
  const std::int32_t slot = publish(place, 0);
  rows.start(shared.slots[0]);
  prefetch_row<kFormat>(p.layer.pool, slot);
  prefetch_row<kFormat>(p.layer.pool, publish(next_of(place), 1));
  prefetch_slots(slots_of({first + work.clusters, 0}));
  ptx::cluster_wait();       // not earlier: no other block has anything to do with what this one gathers
  std::uint32_t parity = 0;  // of the tiles
  std::uint32_t ring = 0;
  std::uint32_t item_parity = 0;
  while (place.item < work.items) {
    const std::uint32_t next_ring = ring == kAhead - 1 ? 0 : ring + 1;
    const std::uint32_t last_ring = ring == 0 ? kAhead - 1 : ring - 1;
    request_slot(slots_of(next_of(next_of(place))), last_ring, shared);
    const bool any = has_entries(shared, ring);
    shared.empty[0].wait(parity ^ 1U);
    if (any) {
      rows.store(ptx::shared_address(shared.rows[0]), shared.slots[ring]);
      rows.finish();
    }
    show_half(0, ring, shared);
    if (any) {
      rows.start(shared.slots[ring] + kHalf);
    }
    shared.empty[1].wait(parity ^ 1U);
    if (place.tile == 0) {  // where the sums of the last item were, if there is one
      shared.drained.wait(item_parity ^ 1U);
    }
    if (any) {
      rows.store(ptx::shared_address(shared.rows[1]), shared.slots[ring] + kHalf);
      rows.finish();
    }
    show_half(1, ring, shared);
    // What follows passes while the consumers are at the two halves.
    place = next_of(place);
    rows.start(shared.slots[next_ring]);
    const Place upcoming = next_of(place);
    prefetch_row<kFormat>(p.layer.pool, publish(upcoming, last_ring));
    if (upcoming.tile == 0) {
      prefetch_slots(slots_of({upcoming.item + work.clusters, 0}));
    }
    parity ^= 1U;
    ring = next_ring;
    item_parity ^= place.tile == 0 ? 1U : 0U;
  }
}

}  // namespace echo::mla
