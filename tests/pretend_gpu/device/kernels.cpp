// Kernels: they are launched, counted, and compute nothing.
#include "pretend.h"

#include <cstring>

using namespace pretend;

namespace {

struct Call {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Call next_call;
struct LaunchConfig {  // cudaLaunchConfig_t, as far as it is read here
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

}  // namespace

// --- What the compiler puts around `kernel<<<...>>>(...)`

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterVar() {}
EXPORT void __cudaRegisterFunction() {}
EXPORT unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  next_call = {grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(
    dim3* grid, dim3* block, size_t* shared, cudaStream_t* stream) {
  *grid = next_call.grid;
  *block = next_call.block;
  *shared = next_call.shared;
  *stream = next_call.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(
    const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launched(stream);
}
EXPORT cudaError_t cudaLaunchKernel(
    const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launched(stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(
    const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launched(stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const void* config, const void*, void**) {
  return launched(static_cast<const LaunchConfig*>(config)->stream);
}

// --- What a kernel is

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024;
  of->numRegs = 32;
  of->ptxVersion = of->binaryVersion = 90;
  of->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char place[1 << 16];
  *address = place;
  return cudaSuccess;
}
