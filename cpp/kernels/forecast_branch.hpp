#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/cuda_handles.hpp"

namespace echo {

/// Two streams beside a pass's: on one rows are found, on the other fetched. Each fork continues both, behind what is
/// on the pass's stream by then; what must not run beside them joins. Works in a stream capture, too: the branches then
/// belong to the graph. What a capture left unjoined never ran and is forgotten. Few thread blocks that the rest of the
/// pass is to wait for as little as possible: they come before others.
class ForecastBranch {
 public:
  /// Behind all work on the stream so far; for a layer that is known by the address of its pool.
  void fork(cudaStream_t stream, const void* pool);
  cudaStream_t find_stream() const { return find_.get(); }
  /// Once finding is launched: fetching goes behind it.
  void found();
  cudaStream_t fetch_stream() const { return fetch_.get(); }
  /// Once fetching is launched.
  void fetched();

  /// The stream waits until rows were found.
  void join_found(cudaStream_t stream);
  /// And fetched.
  void join(cudaStream_t stream);
  /// The same if the layer was forked for since the last join.
  void join_layer(cudaStream_t stream, const void* pool);

 private:
  /// Whether the stream is in the capture, or out of any, in which the last fork was; forgets the branches otherwise.
  bool same_capture(cudaStream_t stream);

  Stream find_{first_priority()};
  Stream fetch_{first_priority()};
  Event forked_;
  Event found_;
  Event fetched_;
  std::vector<const void*> pools_;  ///< forked for since the last join
  bool finding_ = false;
  unsigned long long capture_ = 0;  ///< 0: none
};

}  // namespace echo
