#pragma once
// Who may touch which slot, when many threads of a launch look rows up, give slots away and fetch at the same time.
// Two words decide, and nothing but compare-and-swap and maximum changes them while others may look:
//
//   stamp[slot]     a tick          last use; the current tick: in use by this call, not to be given away
//                   new_row_at(t)   the next tick: given to a new row at the begin of the pass of tick t
//                   prefetched_at(t), forecast_at(t)  fetched ahead in tick t, not used since
//                   kClaimed        between two rows
//                   kFree           empty, and on the stack of free slots
//   slot_of[row]    a slot          resident, or about to be evicted: the stamp decides
//                   kPending        some thread of this launch fetches the row
//                   kNone           not resident
//                   failed_at(t)    not resident, since the call of tick t found no slot for it
//
// A hit raises the stamp to the current tick with fetch_max and looks at what was there. Older: the slot is protected
// now, and since it was not claimed before, it holds the row. The current tick: somebody used or claimed it in this
// call, so host_of tells; if that is another row, slot_of has changed meanwhile. kClaimed: look again, it passes.
// Whoever evicts claims the stamp, unmaps the old row, writes host_of, and behind a fence the stamp and the new row's
// slot_of. Who swaps slot_of to kPending fetches the row; all others wait for the slot, after they have done their own
// work, so that nobody waits for somebody who waits. No launch leaves kPending or kClaimed behind.
// New rows have slots since the begin of the pass, in a stamp that nobody needs to raise: who looks them up finds a hit
// at once, while others write them.
// (A slot that a stale slot_of names is reached by its address, which orders the two accesses on any GPU that does not
// guess values; an acquire would say so formally and cost every hit its cached lines.)
// Whoever fetches ahead does the same without protecting anything, in a launch in which nobody uses rows: it passes
// over rows that are resident or on their way, and gives a row up when there is no slot for it. (A forecast leaves
// kPending and kClaimed to its second launch, which comes before anybody else looks.)
// Host code can call the same functions: with threads of the CPU the protocol is tested where there is no GPU.

#include <cuda/atomic>

#include <cstdint>

#include "cache_manager/layer_view.hpp"

namespace echo {

inline constexpr std::int32_t kPending = -2;
inline constexpr std::int32_t kClaimed = 0x7FFFFFFF;

/// What slot_of says of a row for which a call got no slot. With its tick, so that no later call believes it.
__host__ __device__ inline std::int32_t failed_at(std::int32_t tick) { return kPending - tick; }

using AtomicWord = cuda::atomic_ref<std::int32_t, cuda::thread_scope_device>;

__host__ __device__ inline AtomicWord slot_word(const LayerView& layer, std::int32_t row) {
  return AtomicWord(layer.slot_of[row]);
}
__host__ __device__ inline AtomicWord stamp_word(const LayerView& layer, std::int32_t slot) {
  return AtomicWord(layer.stamp[slot]);
}
__host__ __device__ inline AtomicWord host_word(const LayerView& layer, std::int32_t slot) {
  return AtomicWord(layer.host_of[slot]);
}

enum class Protection : std::int32_t {
  done,       ///< the slot holds the row and is not given away in this call
  unsettled,  ///< the slot changes hands at the moment
  stale,      ///< the slot holds another row
};

/// Protects a slot that slot_of named for a row.
__host__ __device__ inline Protection protect(const LayerView& layer, std::int32_t slot, std::int32_t row,
                                              std::int32_t now) {
  const std::int32_t before = stamp_word(layer, slot).fetch_max(now, cuda::memory_order_relaxed);
  if (before != now) {
    return before == kClaimed ? Protection::unsettled : Protection::done;
  }
  // Ordered behind the stamp of whoever claimed the slot; only here, since a fence costs every hit its cached lines.
  cuda::atomic_thread_fence(cuda::memory_order_acquire, cuda::thread_scope_device);
  return host_word(layer, slot).load(cuda::memory_order_relaxed) == row ? Protection::done : Protection::stale;
}

/// Looks a row up and protects its slot, given what slot_of said of it a moment ago. Returns the slot; kNone: the
/// caller has to fetch the row, nobody else will; kPending: another thread does, or found no slot, see wait_for.
__host__ __device__ inline std::int32_t look_up(const LayerView& layer, std::int32_t row, std::int32_t now,
                                                std::int32_t slot) {
  const AtomicWord word = slot_word(layer, row);
  while (slot != kPending && slot != failed_at(now)) {
    const Protection protection = slot >= 0 ? protect(layer, slot, row, now) : Protection::stale;
    if (protection == Protection::done) {
      return slot;
    }
    if (protection == Protection::unsettled) {
      slot = word.load(cuda::memory_order_relaxed);
    } else if (word.compare_exchange_strong(slot, kPending, cuda::memory_order_relaxed)) {
      return kNone;
    }
  }
  return kPending;
}
__host__ __device__ inline std::int32_t look_up(const LayerView& layer, std::int32_t row, std::int32_t now) {
  return look_up(layer, row, now, slot_word(layer, row).load(cuda::memory_order_relaxed));
}

/// Slot of a row that another thread of this launch makes resident, protected; kNone if that thread got no slot.
/// A slot that follows kPending is the row's for the rest of the launch: nobody takes what is claimed or of this tick.
__host__ __device__ inline std::int32_t wait_for(const LayerView& layer, std::int32_t row, std::int32_t now) {
  bool pending = false;
  for (;;) {
    const std::int32_t slot = slot_word(layer, row).load(cuda::memory_order_relaxed);
    if (slot == failed_at(now)) {
      return kNone;
    }
    if (slot >= 0 && (pending || protect(layer, slot, row, now) == Protection::done)) {
      return slot;
    }
    pending = pending || slot == kPending;
#ifdef __CUDA_ARCH__
    __nanosleep(20);
#endif
  }
}

/// Claims a slot that was seen with `stamp` and `row`, and unmaps the row; false if it was used or claimed meanwhile.
__host__ __device__ inline bool evict(const LayerView& layer, std::int32_t slot, std::int32_t stamp, std::int32_t row) {
  if (!stamp_word(layer, slot).compare_exchange_strong(stamp, kClaimed, cuda::memory_order_relaxed)) {
    return false;
  }
  std::int32_t expected = slot;
  slot_word(layer, row).compare_exchange_strong(expected, kNone, cuda::memory_order_relaxed);
  return true;
}

/// For whoever wants to fetch a row ahead: kNone if the caller is to do it, else what says that the row is resident, or
/// that somebody else is fetching it. Who does not look at that at once has other accesses under way meanwhile.
__host__ __device__ inline std::int32_t claim_row(const LayerView& layer, std::int32_t row) {
  std::int32_t before = kNone;
  slot_word(layer, row).compare_exchange_strong(before, kPending, cuda::memory_order_relaxed);
  return before;
}
/// Leaves a claimed row to whoever needs it.
__host__ __device__ inline void give_up_row(const LayerView& layer, std::int32_t row) {
  slot_word(layer, row).store(kNone, cuda::memory_order_relaxed);
}

/// Gives an evicted or free slot to a row that the caller fetches: the first half; publish is the second.
__host__ __device__ inline void assign(const LayerView& layer, std::int32_t slot, std::int32_t row) {
  host_word(layer, slot).store(row, cuda::memory_order_relaxed);
}

/// Maps a row to its slot, with the current tick or one that says it was fetched ahead. On its own where nobody reads
/// the slot in this launch.
__host__ __device__ inline void map_row(const LayerView& layer, std::int32_t slot, std::int32_t row,
                                        std::int32_t stamp) {
  stamp_word(layer, slot).store(stamp, cuda::memory_order_relaxed);
  slot_word(layer, row).store(slot, cuda::memory_order_relaxed);
}
/// Shows the row's slot to everybody. Ordered behind what this thread, or one that it met at a barrier, has assigned.
__host__ __device__ inline void publish(const LayerView& layer, std::int32_t slot, std::int32_t row,
                                        std::int32_t stamp) {
  cuda::atomic_thread_fence(cuda::memory_order_release, cuda::thread_scope_device);
  map_row(layer, slot, row, stamp);
}

/// Adds to a counter that nobody waits for.
__device__ inline void count(std::int64_t* counter, std::int32_t number) {
  if (number != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(number));
  }
}

}  // namespace echo
