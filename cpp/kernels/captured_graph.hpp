#pragma once

#include <functional>

#include "kernels/cuda_handles.hpp"

namespace echo {

/// An executable CUDA graph. Destroyed only after its last run has finished.
class CapturedGraph {
 public:
  /// Records what `body` puts on the stream, or on streams forked from it. If the body throws, so
  /// does this, and the stream is out of capture.
  CapturedGraph(cudaStream_t stream, const std::function<void()>& body);
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void launch(cudaStream_t stream);

 private:
  Event finished_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace echo
