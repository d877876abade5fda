#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "echo/planner.hpp"
#include "echo/runtime.hpp"
#include "kernels/params.hpp"
#include "runtime/backend.hpp"
#include "runtime/host_pool.hpp"

namespace echo {

/// What is predicted of a session's k-th scores, [layers] each, NaN where unknown; see kernels/prediction.hpp.
struct SessionPrediction {
  std::vector<float> thresholds;
  std::vector<float> deviations;
};

/// Owns everything a runtime keeps on the device: per layer the pool, its maps and stamps and the index keys, and
/// once the workspaces of a pass. Allocated from the plan, item by item.
class DeviceState {
 public:
  DeviceState(std::shared_ptr<Backend> backend, const Plan& plan, const HostPool& pool);

  const std::vector<LayerView>& layers() const { return views_; }
  const LayerView& layer(std::int32_t index) const { return views_[static_cast<std::size_t>(index)]; }

  float* scores() const { return scores_.data<float>(); }
  std::int32_t* selection() const { return selection_.data<std::int32_t>(); }
  std::int32_t* selected_slots() const { return selected_slots_.data<std::int32_t>(); }
  /// [layers, pass_rows]
  float* kth_score() const { return kth_score_.data<float>(); }
  /// [max_sessions, layers]
  float* thresholds() const { return thresholds_.data<float>(); }
  float* deviations() const { return deviations_.data<float>(); }
  /// Two arrays of the rows of a decode step each, for calls of score in turns; null without sifting, like the next.
  RowSift* sift_rows(bool second) const { return sift_rows_.data<RowSift>() + (second ? step_rows_ : 0); }
  std::int32_t* prefetched(bool second) const { return prefetched_.data<std::int32_t>() + (second ? 1 : 0); }
  /// [rows of a decode step, plan's sift_capacity]
  ScoredToken* candidates() const { return candidates_.data<ScoredToken>(); }
  std::int32_t* control() const { return control_.data<std::int32_t>(); }
  /// [host_blocks]
  BlockOwner* owners() const { return owners_.data<BlockOwner>(); }

  /// Empties all pools: every row will be recalled anew. Ticks may start over.
  void forget_residency() const;
  /// Forgets the k-th scores of a pass that failed.
  void clear_kth_scores() const;
  /// Of a session; cleared means unknown.
  void clear_prediction(std::int32_t session) const;
  SessionPrediction read_prediction(std::int32_t session) const;
  void write_prediction(std::int32_t session, const SessionPrediction& values) const;
  /// Does not wait for verbs under way where the backend can do without.
  std::vector<LayerStats> read_stats() const;
  CacheState read_layer(std::int32_t layer) const;

 private:
  struct LayerBuffers {
    Buffer slots;
    Buffer index_keys;
    Buffer slot_of;
    Buffer host_of;
    Buffer stamp;
    Buffer free_slots;
  };

  /// Puts all slots on the stacks of free ones, the first on top.
  void free_all_slots() const;
  float* of_session(float* values, std::int32_t session) const {
    return values + static_cast<std::size_t>(session) * views_.size();
  }

  std::shared_ptr<Backend> backend_;  // its memory resource must outlive the memory
  std::vector<LayerBuffers> buffers_;
  Buffer replacement_;
  Buffer counters_;
  Buffer scores_;
  Buffer selection_;
  Buffer selected_slots_;
  Buffer kth_score_;
  Buffer thresholds_;
  Buffer deviations_;
  Buffer sift_rows_;
  Buffer prefetched_;
  Buffer candidates_;
  Buffer control_;
  Buffer owners_;
  std::vector<LayerView> views_;
  std::int64_t step_rows_;
};

}  // namespace echo
