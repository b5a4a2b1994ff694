// NVML, libnvidia-ml.so.1: counts what the driver has, which may be more than CUDA shows (MIG).
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace {

// One of the preloaded library's clocks; 0 where it isn't there.
double read(const char* name) {
  auto clock = reinterpret_cast<double (*)()>(dlsym(RTLD_DEFAULT, name));
  return clock == nullptr ? 0 : clock();
}

double asked_ms = read("pretend_gpu_now_ms"), idle_ms = 0;

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
  const double now = read("pretend_gpu_now_ms"), so_far = read("pretend_gpu_idle_ms");
  if (now <= asked_ms) return 3;  // not supported
  const double share = 1 - (so_far - idle_ms) / (now - asked_ms);
  rates[0] = share < 0 ? 0 : static_cast<unsigned>(100 * share + 0.5);
  rates[1] = 0;
  asked_ms = now;
  idle_ms = so_far;
  return 0;
}
}
