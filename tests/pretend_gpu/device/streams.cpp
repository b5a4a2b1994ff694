// Streams and events. What is posted to a stream runs on its own thread; all else is done at once.
#include "pretend.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace pretend {
namespace {

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

double launch_ms() {
  static const double cost = std::stod(setting("PRETEND_GPU_LAUNCH_MS", "0"));
  return cost;
}

void sleep_until(double time_ms) {
  const double left = time_ms - now_ms();
  if (left > 0) usleep(static_cast<useconds_t>(left * 1000));
}

struct Stream {
  std::mutex guard;
  std::condition_variable changed;
  std::deque<std::function<void()>> waiting;
  uint64_t posted = 0, done = 0;
  bool has_thread = false;
  std::atomic<double> busy_until{0};

  void run() {
    std::unique_lock<std::mutex> locked(guard);
    for (;;) {
      changed.wait(locked, [this] { return !waiting.empty(); });
      const auto work = std::move(waiting.front());
      waiting.pop_front();
      locked.unlock();
      work();
      locked.lock();
      done++;
      changed.notify_all();
    }
  }
};

// Streams live as long as the process: a thread of theirs may be in a collective for ever.
Stream* stream_of(cudaStream_t handle) {
  static auto* usual = new std::map<int, Stream*>;
  static std::mutex guard;
  if (handle != nullptr) return reinterpret_cast<Stream*>(handle);
  std::lock_guard<std::mutex> locked(guard);
  Stream*& found = (*usual)[current_device()];
  if (found == nullptr) found = new Stream;
  return found;
}

void wait_for(Stream* stream, uint64_t ticket) {
  std::unique_lock<std::mutex> locked(stream->guard);
  stream->changed.wait(locked, [=] { return stream->done >= ticket; });
}

struct Event {
  Stream* stream = nullptr;
  uint64_t ticket = 0;  // of what was posted last when it was recorded
  double time_ms = 0;

  bool over() {
    if (stream == nullptr) return true;
    std::lock_guard<std::mutex> locked(stream->guard);
    return stream->done >= ticket && time_ms <= now_ms();
  }
  void wait() {
    if (stream != nullptr) wait_for(stream, ticket);
    sleep_until(time_ms);
  }
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

std::mutex idle_guard;
double device_busy_until = 0, idle = 0;

cudaError_t record(cudaEvent_t handle, cudaStream_t on) {
  count(EVENTS);
  if (is_capturing(on)) return cudaSuccess;
  Event* event = event_of(handle);
  Stream* stream = stream_of(on);
  std::lock_guard<std::mutex> locked(stream->guard);
  event->stream = stream;
  event->ticket = stream->posted;
  event->time_ms = std::max(now_ms(), stream->busy_until.load());
  return status();
}

}  // namespace

void post(cudaStream_t handle, std::function<void()> work) {
  Stream* stream = stream_of(handle);
  std::lock_guard<std::mutex> locked(stream->guard);
  stream->waiting.push_back(std::move(work));
  stream->posted++;
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread([stream] { stream->run(); }).detach();
  }
  stream->changed.notify_all();
}

void drain(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> locked(stream->guard);
    ticket = stream->posted;
  }
  wait_for(stream, ticket);
}

EXPORT void pretend_gpu_drain(cudaStream_t handle) { drain(handle); }

void occupy(cudaStream_t handle) {
  if (launch_ms() <= 0) return;
  Stream* stream = stream_of(handle);
  std::lock_guard<std::mutex> locked(idle_guard);
  const double now = now_ms();
  if (device_busy_until > 0 && now > device_busy_until) idle += now - device_busy_until;
  stream->busy_until = std::max(now, stream->busy_until.load()) + launch_ms();
  device_busy_until = std::max(device_busy_until, stream->busy_until.load());
}

}  // namespace pretend

using namespace pretend;

// --- Read by the tests: how long the device had nothing to do, in ms

EXPORT double pretend_gpu_idle_ms() {
  std::lock_guard<std::mutex> locked(idle_guard);
  return idle;
}

// --- Streams

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  std::lock_guard<std::mutex> locked(stream->guard);
  const bool over = stream->done == stream->posted && stream->busy_until <= now_ms();
  return over ? status() : cudaErrorNotReady;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (is_capturing(handle)) return cudaErrorStreamCaptureUnsupported;
  count(STREAM_SYNCS);
  drain(handle);
  sleep_until(stream_of(handle)->busy_until);
  return status();
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  count(DEVICE_SYNCS);
  drain(nullptr);
  sleep_until(device_busy_until);
  return status();
}
// Work on a stream is done at once, so that the host itself waits here for what was posted elsewhere.
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t of, unsigned) {
  count(WAITS);
  Event* event = event_of(of);
  if (event->stream == nullptr || event->stream == stream_of(handle)) return status();
  wait_for(event->stream, event->ticket);
  Stream* stream = stream_of(handle);
  stream->busy_until = std::max(stream->busy_until.load(), event->time_ms);
  return status();
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*call)(void*), void* with) {
  drain(stream);
  call(with);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, void (*call)(cudaStream_t, cudaError_t, void*), void* with, unsigned) {
  drain(stream);
  call(stream, cudaSuccess, with);
  return cudaSuccess;
}

// --- Events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return record(event, stream);
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return record(event, stream);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event_of(event)->over() ? status() : cudaErrorNotReady;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count(EVENT_SYNCS);
  event_of(event)->wait();
  return status();
}
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = static_cast<float>(event_of(end)->time_ms - event_of(begin)->time_ms);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  return cudaEventElapsedTime(ms, begin, end);
}
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  return cudaErrorNotSupported;
}
