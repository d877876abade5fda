#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "kernels/cuda_check.hpp"

namespace echo::bench {

/// An event with a time.
class TimeEvent {
 public:
  TimeEvent() { ECHO_CUDA_CHECK(cudaEventCreate(&handle_)); }
  ~TimeEvent() { ECHO_CUDA_WARN(cudaEventDestroy(handle_)); }
  TimeEvent(const TimeEvent&) = delete;
  TimeEvent& operator=(const TimeEvent&) = delete;

  void record(cudaStream_t stream) { ECHO_CUDA_CHECK(cudaEventRecord(handle_, stream)); }
  /// Microseconds between two events that have happened.
  double since(const TimeEvent& earlier) const;

 private:
  cudaEvent_t handle_ = nullptr;
};

/// A CUDA graph of what `body` puts on the stream, whose nodes can be counted.
class TimedGraph {
 public:
  TimedGraph(cudaStream_t stream, const std::function<void()>& body);
  ~TimedGraph();
  TimedGraph(const TimedGraph&) = delete;
  TimedGraph& operator=(const TimedGraph&) = delete;

  int nodes() const { return nodes_; }
  void launch(cudaStream_t stream) { ECHO_CUDA_CHECK(cudaGraphLaunch(executable_, stream)); }

 private:
  int nodes_ = 0;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace echo::bench
