// Memory: of the device, pinned, pageable; copies.
#include "pretend.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace pretend {
namespace {

struct Block {
  size_t bytes;
  cudaMemoryType kind;
  int device;
};
std::mutex guard;
std::map<uintptr_t, Block> blocks;  // by where they begin
size_t in_use = 0;                  // bytes of device memory in this process

size_t device_bytes() {
  static const size_t limit = std::stoull(setting("PRETEND_GPU_BYTES", "85899345920"));
  return limit;
}

Block block_of(const void* pointer) {
  std::lock_guard<std::mutex> locked(guard);
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return {0, cudaMemoryTypeUnregistered, 0};
  --after;
  const bool inside = address < after->first + after->second.bytes;
  return inside ? after->second : Block{0, cudaMemoryTypeUnregistered, 0};
}

cudaError_t allocate(void** pointer, size_t bytes, cudaMemoryType kind) {
  if (status() != cudaSuccess) return status();
  const bool on_device = kind == cudaMemoryTypeDevice;
  count(on_device ? ALLOCATIONS : PINNED);
  std::lock_guard<std::mutex> locked(guard);
  if (on_device && in_use + bytes > device_bytes()) return cudaErrorMemoryAllocation;
  const size_t room = bytes > 0 ? bytes : 1;
  if (posix_memalign(pointer, 4096, room) != 0) return cudaErrorMemoryAllocation;
  memset(*pointer, 0xFF, room);  // NaN: what nobody has computed may not be relied on
  blocks[reinterpret_cast<uintptr_t>(*pointer)] = {room, kind, current_device()};
  if (on_device) in_use += room;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  {
    std::lock_guard<std::mutex> locked(guard);
    const auto found = blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == blocks.end()) return cudaSuccess;
    if (found->second.kind == cudaMemoryTypeDevice) in_use -= found->second.bytes;
    blocks.erase(found);
  }
  // A late stream may still use it. CUDA would wait; here torch's allocator is locked, which a thread
  // may want that holds up the arithmetic.
  if (!late()) free(pointer);
  return cudaSuccess;
}

void count_copy(const void* to, const void* from, bool waits) {
  const auto target = block_of(to).kind, source = block_of(from).kind;
  const bool onto = target == cudaMemoryTypeDevice, off = source == cudaMemoryTypeDevice;
  if (onto && off) count(D2D);
  if (onto && !off) count(H2D);
  if (onto && source == cudaMemoryTypeUnregistered) count(H2D_PAGEABLE);
  if (off && !onto) count(D2H);
  if (off && target == cudaMemoryTypeUnregistered) count(D2H_PAGEABLE);
  if (waits) count(COPY_SYNCS);
}

// The host waits for these: memory that isn't pinned may be changed or read right afterwards.
bool is_pageable(const void* to, const void* from) {
  return block_of(to).kind == cudaMemoryTypeUnregistered ||
         block_of(from).kind == cudaMemoryTypeUnregistered;
}

cudaError_t done(cudaStream_t stream, bool may_be_late, const std::function<void()>& work) {
  if (captured(stream, work)) return cudaSuccess;
  if (may_be_late && put_off(stream, work)) return status();
  if (may_be_late) drain(stream);
  else finish(stream);
  work();
  return status();
}

cudaError_t filled(void* at, int value, size_t bytes, cudaStream_t stream) {
  count(LAUNCHES);
  return done(stream, true, [=] { memset(at, value, bytes); });
}

cudaError_t copied(void* to, const void* from, size_t bytes, cudaStream_t stream, bool waits) {
  count_copy(to, from, waits);
  return done(stream, !waits && !is_pageable(to, from), [=] { memmove(to, from, bytes); });
}

}  // namespace
}  // namespace pretend

using namespace pretend;

EXPORT cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  *total = device_bytes();
  *left = *total - in_use;
  return status();
}
EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return allocate(pointer, bytes, cudaMemoryTypeDevice);
}
EXPORT cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) {
  return cudaMalloc(pointer, bytes);
}
EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  return cudaMalloc(pointer, bytes);
}
EXPORT cudaError_t cudaFree(void* pointer) { return release(pointer); }
EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return allocate(pointer, bytes, cudaMemoryTypeHost);
}
EXPORT cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, 0);
}
EXPORT cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }
EXPORT cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* pointer) {
  memset(of, 0, sizeof *of);
  const Block block = block_of(pointer);
  of->type = block.kind;
  of->device = block.device;
  of->devicePointer = const_cast<void*>(pointer);
  if (block.kind == cudaMemoryTypeHost) of->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copied(to, from, bytes, stream, false);
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copied(to, from, bytes, nullptr, true);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copied(to, from, bytes, stream, false);
}
EXPORT cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
    cudaMemcpyKind, cudaStream_t stream) {
  count_copy(to, from, false);
  const auto rows = [=] {
    for (size_t row = 0; row < height; row++)
      memmove(static_cast<char*>(to) + row * to_pitch,
              static_cast<const char*>(from) + row * from_pitch, width);
  };
  return done(stream, !is_pageable(to, from), rows);
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return filled(at, value, bytes, stream);
}
EXPORT cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  return filled(at, value, bytes, nullptr);
}

// --- Pools and handles to other processes: there, and empty

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  static char place;
  *pool = reinterpret_cast<cudaMemPool_t>(&place);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
