// What the parts of the pretend device share. See README.md.
//
// Device memory is memory of the process. A kernel, a matrix product or a convolution is counted and
// computes nothing here: arithmetic.py does that, where torch dispatches. Copies and arithmetic are
// done at once, or on a late stream (PRETEND_GPU_STREAMS) when somebody has to wait for them. A
// collective of NCCL runs beside the host, on a thread of its stream.
#pragma once

#include <driver_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace pretend {

// Order and names are those of COUNTERS in counters.py.
enum Counter {
  LAUNCHES,       // calls that give the device work: a kernel, a product, a convolution, a graph
  PRODUCTS,       // of these: matrix products
  CONVOLUTIONS,   // of these: convolutions and normalizations of cuDNN
  GRAPHS,         // of these: graphs
  H2D,            // copies from the host
  D2H,            // copies to the host
  D2D,            // copies on the device
  H2D_PAGEABLE,   // of these: from memory that isn't pinned
  D2H_PAGEABLE,   // of these: into memory that isn't pinned
  STREAM_SYNCS,   // the host waits for a stream
  EVENT_SYNCS,    // the host waits for an event
  DEVICE_SYNCS,   // the host waits for a device
  COPY_SYNCS,     // the host waits for a copy (cudaMemcpy)
  ALLOCATIONS,    // of device memory (cudaMalloc, not torch's cache)
  PINNED,         // allocations of pinned host memory
  EVENTS,         // events recorded
  WAITS,          // streams told to wait for an event
  COLLECTIVES,    // of NCCL
  NUM_COUNTERS,
};
void count(Counter counter, uint64_t times = 1);

// --- Devices and what can befall them (device.cpp)

int num_devices();
int current_device();
std::string setting(const char* name, const char* otherwise = "");

// What a call returns: cudaSuccess, or the error that has befallen the current device.
cudaError_t status();
// Something is given to the device: the fault may be due. Returns `status`.
cudaError_t launched(cudaStream_t stream, Counter kind = LAUNCHES);

enum class Collective { RUNS, HANGS, FAILS };
// A collective begins on the current device: does it ever end?
Collective collective_due();

// --- Streams (streams.cpp)

// Runs on the stream's own thread, in order, and all that comes before it.
void post(cudaStream_t stream, std::function<void()> work);
// On a late stream the same, but not before somebody waits for it; then true. Otherwise false.
bool put_off(cudaStream_t stream, std::function<void()> work);
bool is_late(cudaStream_t stream);
// PRETEND_GPU_STREAMS: what is done on streams besides the usual one is done when somebody waits for
// it, and no sooner.
bool late();
// Waits until all before is done; what happens at once calls this first.
void drain(cudaStream_t stream);
// The same for a host that waits for the stream: also for a collective that never ends.
void finish(cudaStream_t stream);
// A collective of this process never ends: hosts go on with what doesn't need its end.
void stall();
// The pretend clock: a launch keeps the stream busy for PRETEND_GPU_LAUNCH_MS.
void occupy(cudaStream_t stream);

// --- Graphs (graphs.cpp)

// While the stream is being captured, keeps the work for the graph and returns true.
bool captured(cudaStream_t stream, std::function<void()> work);
bool is_capturing(cudaStream_t stream);
// The host would wait for a stream, or for all of them: true if that can't be, since the stream is
// being captured (or one is, by this thread). Such a capture then ends without a graph.
bool ends_capture(cudaStream_t stream);
bool ends_captures();


}  // namespace pretend
