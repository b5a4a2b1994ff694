// Devices: how many, what they are, what befalls them; counters.
#include "pretend.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

namespace pretend {
namespace {

thread_local int device_of_thread = 0;

// --- Counters: in memory, or in a file named after the process, where somebody else can read them

uint64_t* own_counters() {
  static uint64_t in_memory[NUM_COUNTERS];
  const std::string directory = setting("PRETEND_GPU_COUNTERS");
  if (directory.empty()) return in_memory;
  const std::string path = directory + "/" + std::to_string(getpid());
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* mapped = MAP_FAILED;
  if (file >= 0 && ftruncate(file, sizeof in_memory) == 0)
    mapped = mmap(nullptr, sizeof in_memory, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file >= 0) close(file);
  return mapped == MAP_FAILED ? in_memory : static_cast<uint64_t*>(mapped);
}

uint64_t* counters() {
  // A forked process counts for itself.
  static std::mutex guard;
  static pid_t owner = 0;
  static uint64_t* found = nullptr;
  std::lock_guard<std::mutex> locked(guard);
  if (owner != getpid()) {
    owner = getpid();
    found = own_counters();
  }
  return found;
}

// --- The fault: PRETEND_GPU_FAULT="ecc:device=1:at=200:once=/path"

const std::map<std::string, cudaError_t> ERRORS = {
    {"ecc", cudaErrorECCUncorrectable},
    {"launch", cudaErrorLaunchFailure},
    {"address", cudaErrorIllegalAddress},
    {"lost", cudaErrorUnknown},
};

struct Fault {
  std::string kind, once;
  int device = 0;
  uint64_t at = 1;
};

Fault read_fault() {
  Fault fault;
  std::stringstream words(setting("PRETEND_GPU_FAULT"));
  std::getline(words, fault.kind, ':');
  for (std::string word; std::getline(words, word, ':');) {
    const size_t sign = word.find('=');
    const std::string name = word.substr(0, sign), value = word.substr(sign + 1);
    if (name == "device") fault.device = std::stoi(value);
    if (name == "at") fault.at = std::stoull(value);
    if (name == "once") fault.once = value;
  }
  return fault;
}

const Fault& fault() {
  static const Fault read = read_fault();
  return read;
}

// With once=PATH the first to make the file has the fault; a restarted worker hasn't.
bool befalls() {
  if (fault().once.empty()) return true;
  const int file = open(fault().once.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (file < 0) return false;
  close(file);
  return true;
}

std::atomic<cudaError_t> befallen{cudaSuccess};  // it stays, as on a device
std::atomic<uint64_t> launches{0}, collectives{0};

}  // namespace

std::string setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value != nullptr ? value : otherwise;
}

thread_local bool beside_training = false;

void count(Counter counter, uint64_t times) {
  if (beside_training && counter >= STREAM_SYNCS && counter <= COPY_SYNCS) return;
  __atomic_fetch_add(&counters()[counter], times, __ATOMIC_RELAXED);
}

int num_devices() {
  static const int number = std::stoi(setting("PRETEND_GPU_DEVICES", "1"));
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return number;
  int shown = 0;
  std::stringstream words(visible);
  for (std::string word; std::getline(words, word, ',');) {
    if (word.rfind("MIG-", 0) == 0) return 1;  // one slice to a process, whatever is listed
    const bool known = word.rfind("GPU-", 0) == 0 ||
                       (!word.empty() && std::stoi(word) >= 0 && std::stoi(word) < number);
    if (!known) break;
    shown++;
  }
  return shown;
}

int current_device() { return device_of_thread; }

cudaError_t status() { return befallen; }

cudaError_t launched(cudaStream_t stream, Counter kind) {
  if (kind != LAUNCHES) count(kind);
  if (!captured(stream, [] {})) {
    if (!is_late(stream)) drain(stream);
    count(LAUNCHES);
    occupy(stream);
  }
  const auto found = ERRORS.find(fault().kind);
  if (found != ERRORS.end() && current_device() == fault().device && ++launches == fault().at &&
      befalls())
    befallen = found->second;
  return status();
}

Collective collective_due() {
  const bool hangs = fault().kind == "hang", fails = fault().kind == "nccl";
  if (!(hangs || fails) || current_device() != fault().device) return Collective::RUNS;
  if (++collectives != fault().at || !befalls()) return Collective::RUNS;
  return hangs ? Collective::HANGS : Collective::FAILS;
}

}  // namespace pretend

using namespace pretend;

// --- Read by the tests

EXPORT uint64_t pretend_gpu_counter(int counter) { return counters()[counter]; }

// A thread that holds no step up waits without being counted.
EXPORT void pretend_gpu_beside_training(int beside) { beside_training = beside != 0; }

// --- The CUDA runtime

EXPORT cudaError_t cudaGetDeviceCount(int* number) {
  *number = num_devices();
  return *number > 0 ? cudaSuccess : cudaErrorNoDevice;
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
  device_of_thread = device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = PRETEND_CUDA_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
EXPORT cudaError_t cudaGetLastError() { return status(); }
EXPORT cudaError_t cudaPeekAtLastError() { return status(); }

namespace {

struct Words {
  const char *name, *text;
};
// As the CUDA runtime has them: programs tell errors apart by these words.
const std::map<int, Words> WORDS = {
    {cudaSuccess, {"cudaSuccess", "no error"}},
    {cudaErrorMemoryAllocation, {"cudaErrorMemoryAllocation", "out of memory"}},
    {cudaErrorNoDevice, {"cudaErrorNoDevice", "no CUDA-capable device is detected"}},
    {cudaErrorInvalidDevice, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
    {cudaErrorECCUncorrectable,
     {"cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"}},
    {cudaErrorIllegalAddress,
     {"cudaErrorIllegalAddress", "an illegal memory access was encountered"}},
    {cudaErrorLaunchFailure, {"cudaErrorLaunchFailure", "unspecified launch failure"}},
    {cudaErrorStreamCaptureUnsupported,
     {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
    {cudaErrorStreamCaptureInvalidated,
     {"cudaErrorStreamCaptureInvalidated",
      "operation failed due to a previous error during capture"}},
    {cudaErrorInvalidResourceHandle,
     {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
    {cudaErrorNotReady, {"cudaErrorNotReady", "device not ready"}},
    {cudaErrorUnknown, {"cudaErrorUnknown", "unknown error"}},
};
const Words& words_of(cudaError_t error) {
  const auto found = WORDS.find(error);
  return found == WORDS.end() ? WORDS.at(cudaErrorUnknown) : found->second;
}

}  // namespace

EXPORT const char* cudaGetErrorString(cudaError_t error) { return words_of(error).text; }
EXPORT const char* cudaGetErrorName(cudaError_t error) { return words_of(error).name; }

// --- What a device is: an H100, more or less

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
  if (device >= num_devices()) return cudaErrorInvalidDevice;
  memset(of, 0, sizeof *of);
  strcpy(of->name, "Pretend H100");
  of->totalGlobalMem = 80ull << 30;
  of->sharedMemPerBlock = 49152;
  of->sharedMemPerBlockOptin = 232448;
  of->sharedMemPerMultiprocessor = 233472;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->warpSize = 32;
  of->memPitch = 1 << 30;
  of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsDim[2] = 64;
  of->maxGridSize[0] = 2147483647;
  of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->totalConstMem = 65536;
  of->major = 9;
  of->textureAlignment = 512;
  of->texturePitchAlignment = 32;
  of->multiProcessorCount = 132;
  of->maxThreadsPerMultiProcessor = 2048;
  of->maxBlocksPerMultiProcessor = 32;
  of->l2CacheSize = 50 << 20;
  of->asyncEngineCount = 3;
  of->concurrentKernels = of->unifiedAddressing = of->managedMemory = of->cooperativeLaunch = 1;
  of->pciBusID = device + 1;
  memset(of->uuid.bytes, device + 1, sizeof of->uuid.bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> known = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrComputeCapabilityMinor, 0},
  };
  const auto found = known.find(attribute);
  *value = found == known.end() ? 1 : found->second;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }
