// The driver, libcuda.so.1: opened by name; all it does is in the library that is preloaded.
#include "pretend.h"

#include <cstring>

using namespace pretend;

#define SUCCEEDS(name) \
  EXPORT int name() { return 0; }

SUCCEEDS(cuInit)
SUCCEEDS(cuCtxSetCurrent)
EXPORT int cuDriverGetVersion(int* version) {
  *version = PRETEND_CUDA_VERSION;
  return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int, int) {
  *value = 1;
  return 0;
}
EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = reinterpret_cast<void*>(8);
  return 0;
}
EXPORT int cuCtxGetCurrent(void** context) { return cuDevicePrimaryCtxRetain(context, 0); }
EXPORT int cuGetErrorString(int error, const char** text) {
  *text = error == 0 ? "no error" : "unknown error";
  return 0;
}
EXPORT int cuPointerGetAttribute(void* value, int, unsigned long long) {
  memset(value, 0, 8);
  return 0;
}
EXPORT int cuModuleLoadData(void** module, const void*) {
  static char place;
  *module = &place;
  return 0;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char*) {
  *function = module;
  return 0;
}
EXPORT int cuLaunchKernel(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
    cudaStream_t stream, void**, void**) {
  return launched(stream);
}

SUCCEEDS(pretend_gpu_no_entry)
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** entry, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
  *entry = reinterpret_cast<void*>(pretend_gpu_no_entry);
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
