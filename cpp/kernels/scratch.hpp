#pragma once

#include <cstddef>
#include <cstdint>

#include "cache_manager/forecast_lists.hpp"
#include "kernels/attend.hpp"
#include "kernels/attend_sm90.hpp"
#include "kernels/index_queries.hpp"
#include "kernels/near_lists.hpp"
#include "kernels/prefetch_queue.hpp"
#include "runtime/backend.hpp"

namespace echo {

/// The CUDA backend's working memory, one device allocation: what a verb's launches hand on to each
/// other. Verbs share it, because they run one after the other.
class Scratch {
 public:
  Scratch(MemoryResource& memory, const ScratchSizes& sizes);
  static std::size_t bytes(const ScratchSizes& sizes);

  const ScratchSizes& sizes() const { return sizes_; }
  void* data() const { return buffer_.data(); }
  std::size_t bytes() const { return buffer_.bytes(); }

  const IndexQueryView& index_queries() const { return index_queries_; }
  const AttendPartials& attend_partials() const { return attend_partials_; }
  const AttendExchange& attend_exchange() const { return attend_exchange_; }
  LayerView* layers() const { return layers_; }
  PrefetchQueue* prefetch_queue() const { return prefetch_queue_; }
  /// Of one layer: each has its own, since what they hold outlives the verb.
  ForecastLists forecast(std::int32_t layer) const;
  /// For the select of any layer; nothing where there are no forecasts.
  const NearLists& near() const { return near_; }

 private:
  struct Layout;

  ScratchSizes sizes_;
  Buffer buffer_;
  IndexQueryView index_queries_;
  AttendPartials attend_partials_;
  AttendExchange attend_exchange_;
  LayerView* layers_;
  PrefetchQueue* prefetch_queue_;
  ForecastLists forecast_;  ///< of the first layer
  NearLists near_;
};

}  // namespace echo
