#include "kernels/captured_graph.hpp"

#include <memory>
#include <type_traits>

namespace echo {
namespace {

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const noexcept { ECHO_CUDA_WARN(cudaGraphDestroy(graph)); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph>;

Graph record(cudaStream_t stream, const std::function<void()>& body) {
  cudaGraph_t graph = nullptr;
  // Other threads go on allocating and synchronising meanwhile; only this one must not.
  ECHO_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    body();
  } catch (...) {
    // May itself report that the capture was invalidated; what matters is the body's exception.
    static_cast<void>(cudaStreamEndCapture(stream, &graph));
    static_cast<void>(cudaGetLastError());
    if (graph != nullptr) {
      DestroyGraph{}(graph);
    }
    throw;
  }
  ECHO_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  return Graph(graph);
}

}  // namespace

CapturedGraph::CapturedGraph(cudaStream_t stream, const std::function<void()>& body) {
  const Graph graph = record(stream, body);
  ECHO_CUDA_CHECK(cudaGraphInstantiate(&executable_, graph.get(), 0));
}

CapturedGraph::~CapturedGraph() {
  ECHO_CUDA_WARN(cudaEventSynchronize(finished_.get()));
  ECHO_CUDA_WARN(cudaGraphExecDestroy(executable_));
}

void CapturedGraph::launch(cudaStream_t stream) {
  ECHO_CUDA_CHECK(cudaGraphLaunch(executable_, stream));
  finished_.record(stream);
}

}  // namespace echo
