// NVML, libnvidia-ml.so.1: counts what the driver has, which may be more than CUDA shows (MIG).
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <ctime>

namespace {

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

double asked_ms = now_ms(), idle_ms = 0;

}  // namespace

extern "C" {
int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* number) {
  const char* own = getenv("PRETEND_GPU_NVML_DEVICES");
  const char* all = own != nullptr ? own : getenv("PRETEND_GPU_DEVICES");
  *number = all != nullptr ? atoi(all) : 1;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(index + 1ul);
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* number, void*) {
  *number = 0;
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; }  // not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13020;
  return 0;
}
int nvmlDeviceGetUUID(void* device, char* text, unsigned length) {
  strncpy(text, "GPU-00000000-0000-0000-0000-000000000000", length);
  text[length > 39 ? 39 : 0] = static_cast<char>('0' + reinterpret_cast<size_t>(device));
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** device) {
  // 0000:01:00.0 is the first one.
  return nvmlDeviceGetHandleByIndex_v2(strtoul(address + 5, nullptr, 16) - 1, device);
}
int nvmlDeviceGetUtilizationRates(void*, unsigned* rates) {
  // Since it was asked before, in this process: by the pretend clock.
  auto idle = reinterpret_cast<double (*)()>(dlsym(RTLD_DEFAULT, "pretend_gpu_idle_ms"));
  if (idle == nullptr) return 3;  // not supported
  const double now = now_ms(), so_far = idle();
  const double share = 1 - (so_far - idle_ms) / (now - asked_ms);
  rates[0] = share < 0 ? 0 : static_cast<unsigned>(100 * share + 0.5);
  rates[1] = 0;
  asked_ms = now;
  idle_ms = so_far;
  return 0;
}
}
