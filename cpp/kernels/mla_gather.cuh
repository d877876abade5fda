#pragma once
// Rows of a selection into a tile, by two warpgroups: slots are read and rows brought into the second-level cache a tile
// ahead, rows loaded a quarter of a tile (32 entries) ahead, the first of a half while it is not free yet.
//
// Warp w of the eight has entries 4 w to 4 w + 3 of each quarter. FP8 rows go through registers: a lane has five pieces
// of 16 bytes in flight (20 KB per block), unpacks and stores them, and loads the next quarter's in their place; never
// before a fence, which would wait for them. In a load of latents, lanes 0-3, 8-11, ... read a quarter row's pieces of
// one entry and the others those of the next: the two entries' stores then fall into different banks. BF16 rows are
// copied as they are.

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

inline constexpr std::uint32_t kQuarterBytes = kQuarter * 128;  ///< of an atom
inline constexpr std::uint32_t kWarpEntries = kQuarter / kGatherWarps;  ///< of a warp, in a quarter
inline constexpr std::uint32_t kWarpSlots = kTile / kGatherWarps;       ///< a lane and the one 16 further have the same
static_assert(kTile == kGatherers / 2 && kQuarter == kWarp);

/// Which of the gathering threads this is, read anew: what follows from it takes fewer instructions than registers.
__device__ __forceinline__ std::uint32_t gatherer() { return ptx::thread_anew() - kConsumers; }

/// The thread's slot of a tile, of which `entries` entries exist. Rows that still travel would be waited for here.
__device__ __forceinline__ std::int32_t load_slot(const LayerView& layer, const std::int32_t* slots, int entries,
                                                  const KernelErrorView& errors) {
  const auto entry = static_cast<int>(gatherer() / kWarp * kWarpSlots + gatherer() % kWarpSlots);
  const std::int32_t slot = entry < entries ? slots[entry] : kNone;
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

/// Shows all gathering threads the slots of a tile.
__device__ __forceinline__ void publish_slots(std::int32_t slot, std::uint32_t parity, Shared& shared) {
  const std::uint32_t warp = gatherer() / kWarp;
  shared.slots[parity][warp * kWarpSlots + gatherer() % kWarpSlots] = slot;
  const std::uint32_t entries = __ballot_sync(kAllLanes, slot != kNone);
  if (lane_index() == 0) {
    reinterpret_cast<std::uint16_t*>(shared.entries[parity])[warp] = static_cast<std::uint16_t>(entries);
  }
  ptx::named_barrier(kGatherBarrier, kGatherers);
}

/// Whether a tile whose slots have been published has any row.
__device__ __forceinline__ bool has_entries(const Shared& shared, std::uint32_t parity) {
  return (shared.entries[parity][0] | shared.entries[parity][1]) != 0;
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

/// Latents of a warp's entries of a quarter once more, element by element.
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
      const std::uint32_t place = swizzled(entry, column % 64 / 8) + column % 8 * 2;
      ptx::store_shared(to + column / 64 * kAtomBytes + place, pair);
    }
  }
}

template <>
class Gather<RowFormat::fp8_656> {
 public:
  __device__ __forceinline__ explicit Gather(const std::byte* pool) : pool_(pool) {}

  /// Starts the loads of a tile's first quarter.
  __device__ __forceinline__ void start(const std::int32_t* slots) {
    const Lane lane;
    const LaneSlots from(lane, slots);
    load_scales(lane, from);
#pragma unroll
    for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
      load_latents(lane, pair, from);
    }
    load_rope(lane, from);
  }

  /// Stores the quarter whose slots begin at `slots`, its first row in the first atom at `to`, and starts the loads of
  /// the one that follows if that is to be.
  template <bool kLoadNext>
  __device__ __forceinline__ void store(std::uint32_t to, const std::int32_t* slots) {
    const Lane lane;
    const LaneSlots next(lane, slots + (kLoadNext ? kQuarter : 0));
    const std::uint32_t factors = unpack_factor(scales_);
    bool usual = is_usual_scale(scales_);
    if constexpr (kLoadNext) {
      load_scales(lane, next);
    }
    std::uint32_t marks = 0;
    const std::uint32_t latents = to + (lane.entry + lane.odd()) * 128 + lane.eighth() * kAtomBytes +
                                  (((lane.index & 3U) ^ (lane.entry >> 1 & 2U)) << 5 | lane.odd() << 4);
#pragma unroll
    for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
      // Chunk 2 (lane % 4) + {0, 1} of a row whose number ends with (entry & 4) + 2 pair + odd.
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
      if constexpr (kLoadNext) {
        load_latents(lane, pair, next);
      }
    }
    usual = usual && !has_nan(marks);
    ptx::store_shared(to + kRopeOffset + swizzled(lane.entry + lane.eighth(), lane.index & 7U), rope_);
    if constexpr (kLoadNext) {
      load_rope(lane, next);
    }
    if (!__all_sync(kAllLanes, usual)) {
      __syncwarp();  // the right values come last
      store_exactly(pool_, slots, lane.entry, to);
    }
  }

  /// Waits until what was stored is there.
  __device__ __forceinline__ void finish() const {}

 private:
  static constexpr std::uint32_t kPairs = kWarpEntries / 2;  ///< of entries, of a warp and quarter

  /// Which lane this is, found out anew for each quarter: what follows from it takes fewer instructions than registers.
  struct Lane {
    std::uint32_t index;
    std::uint32_t entry;  ///< the warp's first of a quarter

    __device__ __forceinline__ Lane() {
      const std::uint32_t thread = gatherer();
      index = thread % kWarp;
      entry = thread / kWarp * kWarpEntries;
    }
    /// Which entry of a pair the lane has.
    __device__ __forceinline__ std::uint32_t odd() const { return index / 4 % 2; }
    __device__ __forceinline__ std::uint32_t eighth() const { return index / 8; }
  };

  /// Slots of the rows that a lane reads from: taken before any stores, which the compiler moves no loads across.
  struct LaneSlots {
    std::int32_t latents[kPairs];
    std::int32_t rope;
    std::int32_t scales;

    __device__ __forceinline__ LaneSlots(const Lane& lane, const std::int32_t* slots)
        : rope(slots[lane.entry + lane.eighth()]), scales(slots[lane.entry + lane.index / 4 % kWarpEntries]) {
#pragma unroll
      for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
        latents[pair] = slots[lane.entry + 2 * pair + lane.odd()];
      }
    }
  };

  __device__ __forceinline__ void load_latents(const Lane& lane, std::uint32_t pair, const LaneSlots& slots) {
    const std::byte* from = fp8_row(pool_, slots.latents[pair]) + (lane.index & 3U) * 16 + lane.eighth() * 64;
    codes_[pair][0] = ptx::load(from);
    codes_[pair][1] = ptx::load(from + kLatent / 2);
  }
  __device__ __forceinline__ void load_rope(const Lane& lane, const LaneSlots& slots) {
    rope_ = ptx::load(fp8_row(pool_, slots.rope) + kFp8Scales + 16 + (lane.index & 7U) * 16);
  }
  /// Lane 4 e + g has scale g of entry e, and so has the lane 16 further.
  __device__ __forceinline__ void load_scales(const Lane& lane, const LaneSlots& slots) {
    scales_ = fp8_scale(fp8_row(pool_, slots.scales), lane.index & 3U);
  }

  const std::byte* pool_;
  uint4 codes_[kPairs][2];
  uint4 rope_;
  std::uint32_t scales_;
};

template <>
class Gather<RowFormat::bf16_1152> {
 public:
  __device__ __forceinline__ explicit Gather(const std::byte* pool) : pool_(pool) {}

  __device__ __forceinline__ void start(const std::int32_t* /*slots*/) {}

  template <bool kLoadNext>
  __device__ __forceinline__ void store(std::uint32_t to, const std::int32_t* slots) {
    const std::uint32_t entry = gatherer() / 8;  // eight threads have a row
    const std::uint32_t chunk = gatherer() % 8;
    const std::int32_t slot = slots[entry];
    // The source of an entry that is not there is not read, but has to be an address.
    const std::byte* from = row_address(pool_, slot == kNone ? 0 : slot, kBf16RowBytes) + chunk * 16;
    const std::uint32_t place = to + swizzled(entry, chunk);
#pragma unroll
    for (std::uint32_t atom = 0; atom < kAtoms; ++atom) {
      ptx::copy_async(place + atom * kAtomBytes, from + atom * 128, slot != kNone);
    }
  }
  /// Waits until what was stored is there.
  __device__ __forceinline__ void finish() const { ptx::wait_copies(); }

 private:
  const std::byte* pool_;
};

/// Shows the consumers a half that has been stored.
__device__ __forceinline__ void announce(std::uint32_t half, std::uint32_t parity, Shared& shared) {
  if (threadIdx.x == kConsumers) {
    shared.present[half] = {shared.entries[parity][half], has_entries(shared, parity) ? 1U : 0U};
  }
  ptx::fence_for_tensor_cores();
  __syncwarp();
  if (lane_index() == 0) {
    shared.full[half].arrive();
  }
}

/// The gathering warpgroups.
template <RowFormat kFormat>
__device__ __forceinline__ void gather(const AttendParams& p, const Work& work, const Split& split, std::int32_t first,
                                       Shared& shared, const KernelErrorView& errors) {
  const auto slot_at = [&](Place place) {
    const std::int32_t* slots =
        p.slots + static_cast<std::int64_t>(work.row(place.item)) * p.shape.top_k + split.begin + place.tile * kTile;
    return load_slot(p.layer, slots, place.item < work.items ? split.count - place.tile * kTile : 0, errors);
  };
  Gather<kFormat> rows(p.layer.pool);
  Place place{first, 0};
  std::int32_t upcoming = slot_at(place);
  prefetch_row<kFormat>(p.layer.pool, upcoming);
  publish_slots(upcoming, 0, shared);
  rows.start(shared.slots[0]);
  ptx::cluster_wait();  // for when other blocks are told that their sums have been read
  std::uint32_t parity = 0;  // of the tiles
  std::uint32_t item_parity = 0;
  while (place.item < work.items) {
    upcoming = slot_at(place.next(work, split.tiles));
    const bool any = has_entries(shared, parity);
    shared.empty[0].wait(parity ^ 1U);
    if (any) {
      const std::uint32_t to = ptx::shared_address(shared.rows[0]);
      rows.template store<true>(to, shared.slots[parity]);
      rows.template store<false>(to + kQuarterBytes, shared.slots[parity] + kQuarter);
      rows.finish();
    }
    announce(0, parity, shared);
    if (any) {
      rows.start(shared.slots[parity] + 2 * kQuarter);
    }
    prefetch_row<kFormat>(p.layer.pool, upcoming);
    shared.empty[1].wait(parity ^ 1U);
    if (place.tile == 0 && place.item != first) {  // where the sums of the last item were
      shared.drained.wait(item_parity ^ 1U);
    }
    if (any) {
      const std::uint32_t to = ptx::shared_address(shared.rows[1]);
      rows.template store<true>(to, shared.slots[parity] + 2 * kQuarter);
      rows.template store<false>(to + kQuarterBytes, shared.slots[parity] + 3 * kQuarter);
      rows.finish();
    }
    announce(1, parity, shared);
    parity ^= 1U;
    publish_slots(upcoming, parity, shared);
    rows.start(shared.slots[parity]);
    place = place.next(work, split.tiles);
    item_parity ^= place.tile == 0 ? 1U : 0U;
  }
}

}  // namespace echo::mla
