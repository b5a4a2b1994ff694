// NVML, libnvidia-ml.so.1: counts what the driver has, which may be more than CUDA shows (MIG).
#include <cstdlib>
#include <cstring>

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
int nvmlDeviceGetUUID(void* device, char* text, unsigned length) {
  strncpy(text, "GPU-00000000-0000-0000-0000-000000000000", length);
  text[length > 39 ? 39 : 0] = static_cast<char>('0' + reinterpret_cast<size_t>(device));
  return 0;
}
}
