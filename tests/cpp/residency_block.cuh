#pragma once
// A block of recall and a prefetching warp as one thread plays them: what tests of the protocol in residency.cuh share.
// Its functions are found by the type of the layer, so that a test can bring its own.

#include <cuda/atomic>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "residency_maps.cuh"

namespace echo::residency_test {

/// A block of recall as recall.cu and claim_slots.cuh have it, imitated with the same functions and with small windows,
/// which here lie behind a shared hand: other blocks get in its way more often. `pause()` is called where a block may
/// be held up.
template <typename Layer, typename Pause>
class Block {
 public:
  struct Windows {
    std::int32_t slots;    ///< of a window
    std::int32_t planned;  ///< windows before the turn that the block makes of its own
  };

  Block(const Layer& layer, std::vector<std::int32_t> rows, std::int32_t now, Marks marks, const Pause& pause)
      : layer_(layer), rows_(std::move(rows)), slots_(rows_.size(), kNone), now_(now), marks_(marks), pause_(pause) {}

  void run(std::vector<std::int32_t>& content, Windows windows) {
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      slots_[i] = look_up(layer_, rows_[i], now_);
      if (slots_[i] == kNone) {
        fetches_.push_back({.row = rows_[i], .slot = kNone, .entry = i});
      }
      pause_();
    }
    pop();
    evict_others(windows);
    for (std::size_t i = given_; i < fetches_.size(); ++i) {
      slot_word(layer_, fetches_[i].row).store(marks_.failed, kRelaxed);
    }
    pause_();
    for (const Fetch& fetch : std::span(fetches_).first(given_)) {
      publish(layer_, fetch.slot, fetch.row, now_);
      content[at(fetch.slot)] = fetch.row;
      slots_[fetch.entry] = fetch.slot;
    }
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      if (slots_[i] == marks_.pending) {
        slots_[i] = wait(rows_[i]);
      }
    }
  }

  /// Waits for a row that another block makes resident.
  std::int32_t wait(std::int32_t row) {
    while (slot_word(layer_, row).load(kRelaxed) == marks_.pending) {
      pause_();
    }
    return wait_for(layer_, row, now_);
  }

  const std::vector<std::int32_t>& rows() const { return rows_; }
  /// Of each row; kNone if it got none.
  const std::vector<std::int32_t>& slots() const { return slots_; }
  std::size_t missed() const { return fetches_.size(); }
  std::size_t given() const { return given_; }

 private:
  using Word = decltype(slot_word(std::declval<const Layer&>(), 0));
  static constexpr auto kRelaxed = cuda::memory_order_relaxed;

  struct Fetch {
    std::int32_t row;
    std::int32_t slot;
    std::size_t entry;
  };
  struct Seen {
    std::int32_t slot;
    std::int32_t stamp;
    std::int32_t row;
  };

  std::int32_t left() const { return static_cast<std::int32_t>(fetches_.size() - given_); }
  void give(std::int32_t slot) {
    fetches_[given_].slot = slot;
    assign(layer_, slot, fetches_[given_].row);
    ++given_;
  }

  void pop() {
    Word free(layer_.replacement->free);
    const std::int32_t needed = left();
    if (needed == 0 || free.load(kRelaxed) <= 0) {
      return;
    }
    const std::int32_t top = free.fetch_sub(needed, kRelaxed);
    if (top < needed) {
      free.fetch_max(0, kRelaxed);
    }
    for (std::int32_t i = 0; i < std::min(top, needed); ++i) {
      give(layer_.free_slots[top - 1 - i]);
    }
  }

  void evict_others(Windows windows) {
    Word hand(layer_.replacement->hand);
    for (std::int32_t i = 0; i < windows.planned && left() > 0; ++i) {
      const std::int32_t windows_left = windows.planned - i;
      take(hand.fetch_add(windows.slots, kRelaxed), windows.slots, (left() + windows_left - 1) / windows_left);
    }
    if (left() > 0) {
      const std::int32_t first = hand.fetch_add(windows.slots, kRelaxed);
      for (std::int32_t done = 0; done < layer_.slots && left() > 0; done += windows.slots) {
        while (take(first + done, windows.slots, left()) && left() > 0) {
        }
      }
    }
  }

  /// The `quota` oldest of a window. Whether another block was faster with one of them.
  bool take(std::int32_t first, std::int32_t window, std::int32_t quota) {
    std::vector<Seen> seen;
    for (std::int32_t i = 0; i < window; ++i) {
      const std::int32_t slot = (first + i) % layer_.slots;
      const std::int32_t stamp = stamp_word(layer_, slot).load(kRelaxed);
      if (stamp != kFree && stamp < now_) {
        seen.push_back({.slot = slot, .stamp = stamp, .row = host_word(layer_, slot).load(kRelaxed)});
      }
    }
    std::ranges::stable_sort(seen, {}, &Seen::stamp);
    seen.resize(std::min(seen.size(), at(quota)));
    pause_();
    bool beaten = false;
    for (const Seen& victim : seen) {
      if (evict(layer_, victim.slot, victim.stamp, victim.row)) {
        pause_();
        give(victim.slot);
      } else {
        beaten = true;
      }
    }
    return beaten;
  }

  Layer layer_;
  std::vector<std::int32_t> rows_;
  std::vector<std::int32_t> slots_;
  std::vector<Fetch> fetches_;
  std::size_t given_ = 0;
  std::int32_t now_;
  Marks marks_;
  const Pause& pause_;
};

/// Prefetching, imitated likewise: a warp claims rows, as score_prefetch.cuh does where it lists them, and finds slots
/// for them, as in prefetch_rows.cuh. The cap stands for the places of the queue; here what was not fetched goes back.
template <typename Layer, typename Pause>
class Prefetcher {
 public:
  struct Limits {
    std::size_t at_once;  ///< rows that go together
    std::int32_t window;  ///< slots of a window
    std::int32_t windows;
    std::int32_t cap;  ///< rows of all prefetchers together
  };

  Prefetcher(const Layer& layer, std::vector<std::int32_t> rows, std::int32_t now, std::int32_t& used, Limits limits,
             const Pause& pause)
      : layer_(layer), rows_(std::move(rows)), now_(now), used_(used), limits_(limits), pause_(pause) {}

  void run(std::vector<std::int32_t>& content) {
    std::vector<std::int32_t> missing;
    for (const std::int32_t row : rows_) {
      if (slot_word(layer_, row).load(kRelaxed) == kNone) {
        missing.push_back(row);
      }
      pause_();
    }
    for (std::size_t first = 0; first < missing.size(); first += limits_.at_once) {
      fetch(std::span(missing).subspan(first, std::min(limits_.at_once, missing.size() - first)), content);
    }
  }

  std::int32_t fetched() const { return fetched_; }

 private:
  using Word = decltype(slot_word(std::declval<const Layer&>(), 0));
  static constexpr auto kRelaxed = cuda::memory_order_relaxed;

  void fetch(std::span<const std::int32_t> missing, std::vector<std::int32_t>& content) {
    const auto wanted = static_cast<std::int32_t>(missing.size());
    const std::int32_t before = used_.fetch_add(wanted, kRelaxed);
    const std::int32_t granted = std::min(std::max(limits_.cap - before, 0), wanted);
    refund(wanted - granted);
    std::vector<std::int32_t> rows;
    for (const std::int32_t row : missing.first(at(granted))) {
      if (claim_row(layer_, row) == kNone) {
        rows.push_back(row);
      }
    }
    pause_();
    const std::vector<std::int32_t> slots = take_slots(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i < slots.size()) {
        assign(layer_, slots[i], rows[i]);
      } else {
        give_up_row(layer_, rows[i]);
      }
    }
    pause_();
    for (std::size_t i = 0; i < slots.size(); ++i) {
      content[at(slots[i])] = rows[i];
      publish(layer_, slots[i], rows[i], prefetched_at(now_));
    }
    refund(granted - static_cast<std::int32_t>(slots.size()));
    fetched_ += static_cast<std::int32_t>(slots.size());
  }
  void refund(std::int32_t rows) {
    if (rows > 0) {
      used_.fetch_sub(rows, kRelaxed);
    }
  }

  std::vector<std::int32_t> take_slots(std::size_t needed) {
    std::vector<std::int32_t> slots;
    Word free(layer_.replacement->free);
    const auto wanted = static_cast<std::int32_t>(needed);
    if (needed > 0 && free.load(kRelaxed) > 0) {
      const std::int32_t top = free.fetch_sub(wanted, kRelaxed);
      if (top < wanted) {
        free.fetch_max(0, kRelaxed);
      }
      for (std::int32_t i = 0; i < std::min(top, wanted); ++i) {
        slots.push_back(layer_.free_slots[top - 1 - i]);
      }
    }
    for (std::int32_t i = 0; i < limits_.windows && slots.size() < needed; ++i) {
      take_oldest(needed - slots.size(), slots);
    }
    return slots;
  }
  void take_oldest(std::size_t needed, std::vector<std::int32_t>& slots) {
    struct Seen {
      std::int32_t slot;
      std::int32_t stamp;
      std::int32_t row;
    };
    std::vector<Seen> seen;
    for (std::int32_t i = 0; i < std::min(limits_.window, layer_.slots); ++i) {
      const std::int32_t slot = place_++ % layer_.slots;
      const std::int32_t stamp = stamp_word(layer_, slot).load(kRelaxed);
      const std::int32_t row = host_word(layer_, slot).load(kRelaxed);
      if (row >= 0 && yields_ahead(stamp, now_)) {
        seen.push_back({.slot = slot, .stamp = stamp, .row = row});
      }
    }
    std::ranges::stable_sort(seen, std::greater<>{}, [&](const Seen& one) { return age_of(one.stamp, now_); });
    seen.resize(std::min(seen.size(), needed));
    pause_();
    for (const Seen& victim : seen) {
      if (evict(layer_, victim.slot, victim.stamp, victim.row)) {
        slots.push_back(victim.slot);
      }
    }
  }

  Layer layer_;
  std::vector<std::int32_t> rows_;
  std::int32_t now_;
  Word used_;
  Limits limits_;
  const Pause& pause_;
  std::int32_t place_ = 0;
  std::int32_t fetched_ = 0;
};

}  // namespace echo::residency_test
