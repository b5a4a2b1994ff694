// CUDA graphs: what is captured on a stream isn't done; a launch of the graph does it, in its order.
#include "pretend.h"

#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace pretend {
namespace {

struct Graph {
  std::vector<std::function<void()>> nodes;
};
struct Capture {
  Graph* graph;
  uint64_t id;
  std::thread::id by;
  bool is_valid = true;
};
std::mutex guard;
std::map<cudaStream_t, Capture> captures;
std::atomic<uint64_t> last_id{0};

Graph* graph_of(void* handle) { return static_cast<Graph*>(handle); }

// Arithmetic is done by Python (arithmetic.py): it leaves a number in the graph or on a late stream,
// and is called by it. None once Python ends.
void (*replay)(uint64_t) = nullptr;

}  // namespace

bool is_capturing(cudaStream_t stream) {
  std::lock_guard<std::mutex> locked(guard);
  return captures.count(stream) > 0;
}

bool ends_capture(cudaStream_t stream) {
  std::lock_guard<std::mutex> locked(guard);
  const auto found = captures.find(stream);
  if (found != captures.end()) found->second.is_valid = false;
  return found != captures.end();
}

bool ends_captures() {
  std::lock_guard<std::mutex> locked(guard);
  bool any = false;
  for (auto& [stream, capture] : captures)
    if (capture.by == std::this_thread::get_id()) {
      capture.is_valid = false;
      any = true;
    }
  return any;
}

bool captured(cudaStream_t stream, std::function<void()> work) {
  std::lock_guard<std::mutex> locked(guard);
  const auto found = captures.find(stream);
  if (found == captures.end()) return false;
  found->second.graph->nodes.push_back(std::move(work));
  return true;
}

}  // namespace pretend

using namespace pretend;

// --- Used by arithmetic.py

EXPORT void pretend_gpu_on_replay(void (*call)(uint64_t)) { replay = call; }
// The capture's number if the stream is being captured: the graph will call back with the given one.
EXPORT uint64_t pretend_gpu_capture(cudaStream_t stream, uint64_t number) {
  if (!captured(stream, [number] { replay(number); })) return 0;
  std::lock_guard<std::mutex> locked(guard);
  return captures.at(stream).id;
}
// On a late stream: calls back with this number when it is time.
EXPORT void pretend_gpu_put_off(cudaStream_t stream, uint64_t number) {
  put_off(stream, [number] {
    if (replay != nullptr) replay(number);
  });
}

// --- The CUDA runtime

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard<std::mutex> locked(guard);
  captures[stream] = {new Graph, ++last_id, std::this_thread::get_id()};
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard<std::mutex> locked(guard);
  const auto found = captures.find(stream);
  if (found == captures.end()) return cudaErrorIllegalState;
  const Capture capture = found->second;
  captures.erase(found);
  if (!capture.is_valid) delete capture.graph;
  *graph = capture.is_valid ? reinterpret_cast<cudaGraph_t>(capture.graph) : nullptr;
  return capture.is_valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
    size_t* number) {
  std::lock_guard<std::mutex> locked(guard);
  const auto found = captures.find(stream);
  const bool active = found != captures.end();
  *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = active ? found->second.id : 0;
  if (graph != nullptr)
    *graph = active ? reinterpret_cast<cudaGraph_t>(found->second.graph) : nullptr;
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (number != nullptr) *number = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(
    cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(
    cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
  *instance = reinterpret_cast<cudaGraphExec_t>(new Graph(*graph_of(graph)));
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(instance, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  const cudaError_t status = launched(stream, GRAPHS);
  for (const auto& node : graph_of(instance)->nodes)
    if (!put_off(stream, node)) node();
  return status;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  *number = graph_of(graph)->nodes.size();
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph_of(graph);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  delete graph_of(instance);
  return cudaSuccess;
}
