#include "timed_graph.hpp"

#include <cstddef>

namespace echo::bench {

double TimeEvent::since(const TimeEvent& earlier) const {
  float milliseconds = 0.0F;
  ECHO_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, earlier.handle_, handle_));
  return 1000.0 * static_cast<double>(milliseconds);
}

TimedGraph::TimedGraph(cudaStream_t stream, const std::function<void()>& body) {
  cudaGraph_t graph = nullptr;
  ECHO_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    body();
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(stream, &graph));
    static_cast<void>(cudaGetLastError());
    if (graph != nullptr) {
      ECHO_CUDA_WARN(cudaGraphDestroy(graph));
    }
    throw;
  }
  ECHO_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  std::size_t nodes = 0;
  const cudaError_t counted = cudaGraphGetNodes(graph, nullptr, &nodes);
  nodes_ = static_cast<int>(nodes);
  const cudaError_t made = cudaGraphInstantiate(&executable_, graph, 0);
  ECHO_CUDA_WARN(cudaGraphDestroy(graph));
  ECHO_CUDA_CHECK(counted);
  ECHO_CUDA_CHECK(made);
}

TimedGraph::~TimedGraph() { ECHO_CUDA_WARN(cudaGraphExecDestroy(executable_)); }

}  // namespace echo::bench
