// Streams and events. What is posted to a stream or put off runs on its own thread; all else is done
// at once.
#include "pretend.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pretend {

bool late() {
  static const bool asked = setting("PRETEND_GPU_STREAMS") == "late";
  return asked;
}

namespace {

// The clock of device and host with PRETEND_GPU_CLOCK=own: it goes on where the host waits for the
// device, where a program says that time passes, and a little whenever it is read.
std::atomic<int64_t> own_ns{0};
constexpr int64_t READ_NS = 100;

bool has_own_clock() {
  static const bool asked = setting("PRETEND_GPU_CLOCK") == "own";
  return asked;
}

double now_ms() {
  if (has_own_clock()) return (own_ns += READ_NS) / 1e6;
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
  if (left <= 0) return;
  if (has_own_clock())
    own_ns += static_cast<int64_t>(left * 1e6);
  else
    usleep(static_cast<useconds_t>(left * 1000));
}

// Who asks so often whether a stream is through lets it go on: a device does so by itself.
constexpr int PATIENCE = 300;

// Lets other threads of Python go on: what is waited for may be theirs, or compute in Python.
class WithoutPython {
 public:
  WithoutPython() {
    static const auto holds = symbol<int (*)()>("PyGILState_Check");
    static const auto save = symbol<void* (*)()>("PyEval_SaveThread");
    if (holds != nullptr && save != nullptr && holds()) saved_ = save();
  }
  ~WithoutPython() {
    static const auto restore = symbol<void (*)(void*)>("PyEval_RestoreThread");
    if (saved_ != nullptr) restore(saved_);
  }

 private:
  template <class Function>
  static Function symbol(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }
  void* saved_ = nullptr;
};

struct Mark;

struct Stream {
  std::mutex guard;
  std::condition_variable changed;
  std::deque<std::function<void()>> waiting;
  uint64_t posted = 0, done = 0;
  uint64_t wanted = 0;  // its thread goes on until so much is done
  int asked = 0;        // how often in vain, since something was done
  bool has_thread = false, is_late = false;
  std::atomic<double> busy_until{0};
  std::shared_ptr<Mark> behind;  // a collective that never ends, which all after it waits for

  void run() {
    std::unique_lock<std::mutex> locked(guard);
    for (;;) {
      changed.wait(locked, [this] { return done < wanted; });
      const auto work = std::move(waiting.front());
      waiting.pop_front();
      locked.unlock();
      work();
      locked.lock();
      done++;
      asked = 0;
      changed.notify_all();
    }
  }
  // These three with the guard locked.
  uint64_t put(std::function<void()> work) {
    waiting.push_back(std::move(work));
    return ++posted;
  }
  void want(uint64_t ticket) {
    if (ticket <= wanted) return;
    wanted = ticket;
    if (!has_thread) {
      has_thread = true;
      std::thread([this] { run(); }).detach();
    }
    changed.notify_all();
  }
  bool over(uint64_t ticket) {
    if (done < ticket && ++asked >= PATIENCE) want(ticket);
    return done >= ticket;
  }
};

std::mutex all_guard;
std::vector<Stream*>& all_streams() {
  static auto* all = new std::vector<Stream*>;
  return *all;
}

// Streams live as long as the process: a thread of theirs may be in a collective for ever.
Stream* new_stream(bool is_late) {
  auto* made = new Stream;
  made->is_late = is_late;
  std::lock_guard<std::mutex> locked(all_guard);
  all_streams().push_back(made);
  return made;
}

Stream* stream_of(cudaStream_t handle) {
  static auto* usual = new std::map<int, Stream*>;
  static std::mutex guard;
  if (handle != nullptr) return reinterpret_cast<Stream*>(handle);
  std::lock_guard<std::mutex> locked(guard);
  Stream*& found = (*usual)[current_device()];
  if (found == nullptr) found = new_stream(false);
  return found;
}

void wait_for(Stream* stream, uint64_t ticket) {
  std::unique_lock<std::mutex> locked(stream->guard);
  if (stream->done >= ticket) return;
  stream->want(ticket);
  locked.unlock();
  const WithoutPython released;
  locked.lock();
  stream->changed.wait(locked, [=] { return stream->done >= ticket; });
  locked.unlock();  // before Python is asked for again
}

std::atomic<bool> is_stalled{false};

// The same, but true at once where it may never be: a collective hangs.
bool waits_for_ever(Stream* stream, uint64_t ticket) {
  std::unique_lock<std::mutex> locked(stream->guard);
  if (stream->done >= ticket) return false;
  stream->want(ticket);
  locked.unlock();
  const WithoutPython released;
  locked.lock();
  stream->changed.wait(locked, [=] { return stream->done >= ticket || is_stalled; });
  const bool is_over = stream->done >= ticket;
  locked.unlock();
  return !is_over;
}

void wait_for_all(Stream* stream) {
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> locked(stream->guard);
    ticket = stream->posted;
  }
  wait_for(stream, ticket);
}

// Where an event was recorded last.
struct Mark {
  Stream* stream;
  uint64_t ticket;  // of what comes before it; where something did, its own
  std::atomic<double> time_ms;
  std::shared_ptr<Mark> behind;  // what its stream had to wait for then

  bool over() {
    if (behind != nullptr && !behind->over()) return false;
    std::lock_guard<std::mutex> locked(stream->guard);
    return stream->over(ticket) && time_ms <= now_ms();
  }
  void wait() {
    if (behind != nullptr) behind->wait();
    wait_for(stream, ticket);
    sleep_until(time_ms);
  }
};

std::shared_ptr<Mark> behind_which(Stream* stream) {
  std::lock_guard<std::mutex> locked(stream->guard);
  return stream->behind;
}

struct Event {
  std::shared_ptr<Mark> mark;
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

std::mutex idle_guard;
double device_busy_until = 0, idle = 0;

cudaError_t record(cudaEvent_t handle, cudaStream_t on) {
  count(EVENTS);
  if (is_capturing(on)) return cudaSuccess;
  Stream* stream = stream_of(on);
  std::lock_guard<std::mutex> locked(stream->guard);
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  mark->time_ms = std::max(now_ms(), stream->busy_until.load());
  mark->ticket = stream->posted;
  mark->behind = stream->behind;
  // Its time is that when all before it is done.
  if (late() && stream->done < stream->posted)
    mark->ticket = stream->put(
        [mark] { mark->time_ms = std::max(now_ms(), mark->stream->busy_until.load()); });
  event_of(handle)->mark = std::move(mark);
  return status();
}

}  // namespace

void post(cudaStream_t handle, std::function<void()> work) {
  Stream* stream = stream_of(handle);
  std::lock_guard<std::mutex> locked(stream->guard);
  stream->want(stream->put(std::move(work)));
}

bool is_late(cudaStream_t handle) { return stream_of(handle)->is_late; }

bool put_off(cudaStream_t handle, std::function<void()> work) {
  Stream* stream = stream_of(handle);
  if (!stream->is_late) return false;
  std::lock_guard<std::mutex> locked(stream->guard);
  stream->put(std::move(work));
  return true;
}

void drain(cudaStream_t handle) { wait_for_all(stream_of(handle)); }

void finish(cudaStream_t handle) {
  const auto behind = behind_which(stream_of(handle));
  if (behind != nullptr) behind->wait();
  drain(handle);
}

void stall() {
  is_stalled = true;
  std::lock_guard<std::mutex> locked(all_guard);
  for (Stream* stream : all_streams()) {
    std::lock_guard<std::mutex> with(stream->guard);
    stream->changed.notify_all();
  }
}

static void drain_late() {
  if (!late()) return;
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> locked(all_guard);
    all = all_streams();
  }
  for (Stream* stream : all) wait_for_all(stream);
}

EXPORT void pretend_gpu_drain(cudaStream_t handle) { drain(handle); }
EXPORT int pretend_gpu_is_late(cudaStream_t handle) {
  return is_late(handle) && !is_capturing(handle) ? 1 : 0;
}

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

// --- For the tests: the clock, and how long the device has had nothing to do, up to now, in ms

EXPORT double pretend_gpu_now_ms() { return now_ms(); }
EXPORT void pretend_gpu_pass_ms(double time_ms) { sleep_until(now_ms() + time_ms); }

EXPORT double pretend_gpu_idle_ms() {
  std::lock_guard<std::mutex> locked(idle_guard);
  return device_busy_until > 0 ? idle + std::max(0.0, now_ms() - device_busy_until) : idle;
}

// --- Streams

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  // Without the flag a stream keeps in step with the usual one.
  const bool is_late = late() && (flags & cudaStreamNonBlocking) != 0;
  *stream = reinterpret_cast<cudaStream_t>(new_stream(is_late));
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  const auto behind = behind_which(stream);
  if (behind != nullptr && !behind->over()) return cudaErrorNotReady;
  std::lock_guard<std::mutex> locked(stream->guard);
  const bool over = stream->over(stream->posted) && stream->busy_until <= now_ms();
  return over ? status() : cudaErrorNotReady;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (ends_capture(handle)) return cudaErrorStreamCaptureUnsupported;
  count(STREAM_SYNCS);
  finish(handle);
  sleep_until(stream_of(handle)->busy_until);
  return status();
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  if (ends_captures()) return cudaErrorStreamCaptureUnsupported;
  count(DEVICE_SYNCS);
  finish(nullptr);
  drain_late();
  sleep_until(device_busy_until);
  return status();
}
// Work on a stream is done at once, so that the host itself waits here for what was posted elsewhere;
// but where streams are late, what comes next on this one does. For a collective that never ends it
// waits no more than with a device: whoever asks for what comes after it then waits for ever.
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t of, unsigned) {
  count(WAITS);
  const std::shared_ptr<Mark> mark = event_of(of)->mark;
  Stream* stream = stream_of(handle);
  if (mark == nullptr || mark->stream == stream) return status();
  const auto occupied = [=] {
    stream->busy_until = std::max(stream->busy_until.load(), mark->time_ms.load());
  };
  if (!late()) {
    if (!waits_for_ever(mark->stream, mark->ticket)) {
      occupied();
      return status();
    }
    std::lock_guard<std::mutex> locked(stream->guard);
    if (stream->behind == nullptr) stream->behind = mark;
    return status();
  }
  const auto wait = [=] {
    wait_for(mark->stream, mark->ticket);
    occupied();
  };
  std::lock_guard<std::mutex> locked(stream->guard);
  stream->put(wait);
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
  return status();
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
  const auto mark = event_of(event)->mark;
  return mark == nullptr || mark->over() ? status() : cudaErrorNotReady;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count(EVENT_SYNCS);
  const auto mark = event_of(event)->mark;
  if (mark != nullptr) mark->wait();
  return status();
}
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  const auto first = event_of(begin)->mark, last = event_of(end)->mark;
  if (first == nullptr || last == nullptr) return cudaErrorInvalidResourceHandle;
  if (late() && !(first->over() && last->over())) return cudaErrorNotReady;
  *ms = static_cast<float>(last->time_ms - first->time_ms);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  return cudaEventElapsedTime(ms, begin, end);
}
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  return cudaErrorNotSupported;
}
