#pragma once
// What long random runs check, on either backend: pieces of work as in residency_draws.cuh, so that the checks are
// checked where there is no GPU.

#include <algorithm>
#include <cstdint>

#include "residency_draws.cuh"

namespace echo::residency_test {

/// Checks everything that holds between two calls, and what the last one returned.
struct Check {
  WorldView world;
  Verb verb;
  std::int32_t call;
  std::int32_t now;
  bool claims;    ///< new rows of the pass got slots
  bool may_fail;  ///< rows may be left without a slot
  bool failed;    ///< and may be marked so, from this call or before

  static constexpr std::int32_t kLanes = 32;

  __host__ __device__ void raise(Fault fault, std::int64_t index) const {
    if (add(world.findings->faults, 1) == 0) {
      world.findings->fault = fault;
      world.findings->index = static_cast<std::int32_t>(index);
      world.findings->call = call;
    }
  }
  __host__ __device__ bool recalls() const { return verb == Verb::recall || verb == Verb::append_and_recall; }

  __host__ __device__ void check_slot(std::int32_t slot, std::int32_t lane) const {
    const std::int32_t row = world.layer.host_of[slot];
    const std::int32_t stamp = world.layer.stamp[slot];
    if (row == kNone || stamp == kFree) {
      if (lane == 0) {
        add(world.findings->free, 1);
        if (row != kNone || stamp != kFree) {
          raise(Fault::stamp_of_slot, slot);
        }
      }
      return;
    }
    if (row < 0 || row >= world.layer.host_rows || world.layer.slot_of[row] != slot) {
      raise(Fault::row_of_slot, slot);
    } else if (stamp >= now && verb == Verb::begin) {
      return;  // checked with the new rows, and not written yet
    } else if (stamp < 1 || stamp > new_row_at(now)) {
      raise(Fault::stamp_of_slot, slot);
    } else if (!world.has_bytes(row_address(world.layer.pool, slot, world.layer.row_bytes), row, lane, kLanes)) {
      raise(Fault::bytes_of_slot, slot);
    }
  }
  __host__ __device__ void check_row(std::int32_t row) const {
    const std::int32_t slot = world.layer.slot_of[row];
    const bool right = slot >= 0 ? slot < world.layer.slots && world.layer.host_of[slot] == row
                                 : slot == kNone || (failed && slot < -2);
    if (!right) {
      raise(Fault::slot_of_row, row);
    }
  }
  __host__ __device__ void check_stack(std::int32_t place) const {
    if (place < world.layer.replacement->free) {
      const std::int32_t slot = world.layer.free_slots[place];
      if (slot < 0 || slot >= world.layer.slots || world.layer.stamp[slot] != kFree ||
          exchange(world.slot_marks[slot], call) == call) {
        raise(Fault::stack, place);
      }
    }
  }
  __host__ __device__ void check_entry(std::int64_t entry) const {
    const auto row = static_cast<std::int32_t>(entry / world.shape.top_k);
    const std::int32_t position = world.selection[entry];
    const std::int32_t slot = world.slots[entry];
    if (world.step.positions[row] == kNone || position == kNone) {
      if (slot != kNone) {
        raise(Fault::entry, entry);
      }
      return;
    }
    const std::int32_t host_row = world.host_row(row, position);
    add(world.findings->entries, 1);
    add(world.findings->distinct, exchange(world.row_marks[host_row], call) == call ? 0 : 1);
    if (may_fail && slot == kNone) {
      return;
    }
    if (slot < 0 || slot >= world.layer.slots || world.layer.host_of[slot] != host_row ||
        world.layer.stamp[slot] < now) {
      raise(Fault::entry, entry);
    }
  }
  __host__ __device__ void check_new_row(std::int32_t row, std::int32_t lane) const {
    if (world.step.positions[row] == kNone) {
      return;
    }
    const std::int32_t target = world.host_row(row, world.step.positions[row]);
    const std::int32_t slot = world.layer.slot_of[target];
    const bool right = slot < 0 ? !claims || verb == Verb::recall || may_fail
                                : !claims || verb != Verb::begin || world.layer.stamp[slot] >= now;
    if (!right) {
      raise(Fault::new_row, row);
    }
    if (verb == Verb::begin) {
      return;
    }
    if (!world.has_bytes(row_address(world.layer.slab, target, world.layer.host_stride), target, lane, kLanes)) {
      raise(Fault::bytes_of_new_row, row);
    }
  }
  __host__ __device__ void operator()(std::int64_t index) const {
    const auto lane = static_cast<std::int32_t>(index % kLanes);
    if (index < static_cast<std::int64_t>(world.layer.slots) * kLanes) {
      check_slot(static_cast<std::int32_t>(index / kLanes), lane);
    }
    if (index < world.layer.host_rows) {
      check_row(static_cast<std::int32_t>(index));
    }
    if (index < world.layer.slots) {
      check_stack(static_cast<std::int32_t>(index));
    }
    if (verb != Verb::release && index < static_cast<std::int64_t>(world.step.rows) * kLanes) {
      check_new_row(static_cast<std::int32_t>(index / kLanes), lane);
    }
    if (recalls() && index < world.entries()) {
      check_entry(index);
    }
  }
  std::int64_t count() const {
    return std::max({static_cast<std::int64_t>(world.layer.slots) * kLanes, world.layer.host_rows, world.entries(),
                     static_cast<std::int64_t>(world.step.rows) * kLanes});
  }
};

/// Behind Check: whether the numbers agree.
struct Balance {
  Check check;
  bool warm;        ///< the call before recalled the same
  bool one_by_one;  ///< new rows get their slots one after the other

  __host__ __device__ void operator()(std::int64_t /*index*/) const {
    const LayerView& layer = check.world.layer;
    Findings& found = *check.world.findings;
    const LayerCounters& after = *layer.counters;
    const LayerCounters& before = found.counters;
    const auto expect = [&](bool right, Fault fault, std::int64_t value) {
      if (!right) {
        check.raise(fault, value);
      }
    };
    const std::int64_t hits = after.hits - before.hits;
    const std::int64_t misses = after.misses - before.misses;
    const std::int64_t evictions = after.evictions - before.evictions;
    const std::int64_t appended = after.appended - before.appended;
    const std::int64_t filled = found.replacement.free - layer.replacement->free + evictions;
    const bool appends = check.verb == Verb::append || check.verb == Verb::append_and_recall;
    const std::int32_t written = found.new_rows - (check.claims ? 0 : found.new_without_slot);
    const std::int32_t claimed = check.verb == Verb::begin && check.claims ? found.new_without_slot : 0;
    expect(layer.replacement->free == found.free, Fault::free_count, found.free);
    expect(layer.replacement->copied == 0, Fault::copied, layer.replacement->copied);
    if (!check.may_fail) {
      expect(appended == (appends ? written : 0), Fault::appended, appended);
      expect(hits + misses == (check.recalls() ? found.entries : 0), Fault::hits_and_misses, hits + misses);
      expect(misses <= (warm ? 0 : found.distinct) && after.lost_races - before.lost_races <= hits, Fault::misses,
             misses);
      if (check.verb == Verb::release) {
        expect(filled <= 0 && evictions == 0, Fault::balance, filled);
      } else if (check.verb == Verb::begin && !one_by_one) {
        // A new row may have a slot already. A block that has not yet looked it up may find that another one has just
        // taken that slot; the row gets another, too.
        expect(filled >= claimed && filled <= found.new_rows, Fault::balance, filled);
      } else {
        expect(filled == misses + claimed, Fault::balance, filled);
      }
    }
    found.entries = found.distinct = found.free = 0;
    found.counters = after;
    found.replacement = *layer.replacement;
  }
};

/// Of a pass that is about to begin: an index is a row of it. Behind ForgetNewRows.
struct CountNewRows {
  WorldView world;
  __host__ __device__ void operator()(std::int64_t index) const {
    const auto row = static_cast<std::int32_t>(index);
    if (const std::int32_t own = world.step.positions[row]; own != kNone) {
      add(world.findings->new_rows, 1);
      add(world.findings->new_without_slot, world.layer.slot_of[world.host_row(row, own)] < 0 ? 1 : 0);
    }
  }
};
struct ForgetNewRows {
  WorldView world;
  __host__ __device__ void operator()(std::int64_t /*index*/) const {
    world.findings->new_rows = world.findings->new_without_slot = 0;
  }
};

}  // namespace echo::residency_test
