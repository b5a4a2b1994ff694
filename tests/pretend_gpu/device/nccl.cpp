// NCCL: collectives between the processes of a machine, through shared memory.
//
// Every collective is a set of transfers between pairs of ranks (`exchange`), and what a rank does
// with what it has received: sums go in rank order, so that every rank has the same bits. They run on
// the thread of their stream; who doesn't wait for them reads what was there before.
#include "pretend.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <vector>

using namespace pretend;

// --- What is used of nccl.h, which doesn't compile without the whole of CUDA's headers

enum ncclResult_t {
  ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument,
  ncclInvalidUsage, ncclRemoteError,
};
enum ncclDataType_t {
  ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32,
  ncclFloat64, ncclBfloat16,
};
enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };
using ncclComm_t = struct ncclComm*;
struct ncclUniqueId {
  char internal[128];
};
constexpr int NCCL_SPLIT_NOCOLOR = -1, NCCL_VERSION = 22900;

namespace {

constexpr int MOST_RANKS = 8;
constexpr size_t ROOM = 256 << 10;  // bytes on their way between two ranks

struct Channel {  // from one rank to another: a ring
  std::atomic<uint64_t> written, read;
  char data[ROOM];
};
struct Shared {  // a file in memory, of all zeros at first
  std::atomic<int> joined, leaving;
  std::atomic<bool> hangs;  // a rank will never be there
  std::atomic<int> pids[MOST_RANKS];
  Channel channels[MOST_RANKS][MOST_RANKS];  // [from][to]
};

}  // namespace

struct ncclComm {
  int rank, size, device;
  Shared* shared;
  uint64_t token;
  int splits = 0;
  std::atomic<uint64_t> begun{0}, over{0};
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> error{ncclSuccess};
};

namespace {

// --- Communicators

template <class Condition>
bool await(ncclComm* comm, double limit_s, Condition met) {
  for (double waited_s = 0; !met(); waited_s += 1e-4) {
    if ((comm != nullptr && comm->aborted) || waited_s > limit_s) return false;
    usleep(100);
  }
  return true;
}

ncclResult_t join(ncclComm** made, uint64_t token, int size, int rank) {
  if (size > MOST_RANKS) return ncclInvalidArgument;
  const std::string name = "/pretend-nccl-" + std::to_string(token);
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return ncclSystemError;
  void* mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return ncclSystemError;
  auto* shared = static_cast<Shared*>(mapped);
  shared->pids[rank] = getpid();
  if (++shared->joined == size) shm_unlink(name.c_str());
  if (!await(nullptr, 60.0, [=] { return shared->joined >= size; })) return ncclSystemError;
  *made = new ncclComm{rank, size, current_device(), shared, token};
  return ncclSuccess;
}

// --- Transfers

struct Transfer {
  int peer;
  bool sends;
  char* data;
  size_t left;
};

// Moves as much of a transfer as there is room for; true if it is over.
bool moved(ncclComm* comm, Transfer& one) {
  Channel& channel = one.sends ? comm->shared->channels[comm->rank][one.peer]
                               : comm->shared->channels[one.peer][comm->rank];
  const uint64_t written = channel.written, read = channel.read;
  const uint64_t from = one.sends ? written : read;
  size_t bytes = one.sends ? ROOM - (written - read) : written - read;
  bytes = std::min({bytes, one.left, ROOM - from % ROOM});
  char* place = channel.data + from % ROOM;
  if (one.sends) memcpy(place, one.data, bytes);
  else memcpy(one.data, place, bytes);
  (one.sends ? channel.written : channel.read) = from + bytes;
  one.data += bytes;
  one.left -= bytes;
  return one.left == 0;
}

// Makes all transfers; between two ranks, those of a direction in their order. False: aborted.
bool exchange(ncclComm* comm, std::vector<Transfer> all) {
  while (!all.empty()) {
    bool blocked[2][MOST_RANKS] = {};
    size_t left_before = 0, left_after = 0;
    for (Transfer& one : all) {
      left_before += one.left;
      if (!blocked[one.sends][one.peer] && !moved(comm, one)) blocked[one.sends][one.peer] = true;
      left_after += one.left;
    }
    const auto over = [](const Transfer& one) { return one.left == 0; };
    all.erase(std::remove_if(all.begin(), all.end(), over), all.end());
    if (comm->aborted) return false;
    if (comm->shared->hangs) stall();
    if (left_before == left_after && !all.empty()) usleep(20);
  }
  return true;
}

// Sends each rank its part of `parts` and receives one from each, in rank order. Parts of `step`
// bytes apart; all the same with step 0.
bool swap(ncclComm* comm, const char* parts, size_t step, char* received, size_t bytes) {
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < comm->size; peer++) {
    const char* part = parts + peer * step;
    if (peer == comm->rank) {
      memmove(received + peer * bytes, part, bytes);
      continue;
    }
    transfers.push_back({peer, true, const_cast<char*>(part), bytes});
    transfers.push_back({peer, false, received + peer * bytes, bytes});
  }
  return exchange(comm, std::move(transfers));
}

// --- Sums

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};
float wide(Half x) {
  _Float16 value;
  memcpy(&value, &x.bits, 2);
  return static_cast<float>(value);
}
float wide(Brain x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
template <class T>
T wide(T x) {
  return x;
}
template <class T>
struct Narrow {
  static T of(T x) { return x; }
};
template <>
struct Narrow<Half> {
  static Half of(float x) {
    const _Float16 value = static_cast<_Float16>(x);
    Half made;
    memcpy(&made.bits, &value, 2);
    return made;
  }
};
template <>
struct Narrow<Brain> {
  static Brain of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x == x) bits += 0x7FFF + ((bits >> 16) & 1);  // to the nearest, ties to even
    return {static_cast<uint16_t>(bits >> 16)};
  }
};

template <class T>
void combine(const char* parts, char* into, size_t number, int ranks, ncclRedOp_t op) {
  const T* all = reinterpret_cast<const T*>(parts);
  T* sums = reinterpret_cast<T*>(into);
  for (size_t i = 0; i < number; i++) {
    auto value = wide(all[i]);
    for (int rank = 1; rank < ranks; rank++) {
      const auto next = wide(all[rank * number + i]);
      if (op == ncclSum || op == ncclAvg) value += next;
      if (op == ncclProd) value *= next;
      if (op == ncclMax) value = std::max(value, next);
      if (op == ncclMin) value = std::min(value, next);
    }
    if (op == ncclAvg) value /= ranks;
    sums[i] = Narrow<T>::of(value);
  }
}

using Combine = void (*)(const char*, char*, size_t, int, ncclRedOp_t);
struct Kind {
  size_t bytes;
  Combine combine;
};
Kind kind_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return {1, combine<int8_t>};
    case ncclUint8: return {1, combine<uint8_t>};
    case ncclInt32: return {4, combine<int32_t>};
    case ncclUint32: return {4, combine<uint32_t>};
    case ncclInt64: return {8, combine<int64_t>};
    case ncclUint64: return {8, combine<uint64_t>};
    case ncclFloat16: return {2, combine<Half>};
    case ncclFloat32: return {4, combine<float>};
    case ncclFloat64: return {8, combine<double>};
    case ncclBfloat16: return {2, combine<Brain>};
    default: return {0, nullptr};
  }
}

// --- Collectives are begun here and run on the stream's thread

template <class Work>
ncclResult_t begin(ncclComm* comm, cudaStream_t stream, Work work) {
  if (comm->error != ncclSuccess) return comm->error;
  count(COLLECTIVES);
  const Collective what = collective_due();
  if (what == Collective::FAILS) comm->error = ncclRemoteError;
  comm->begun++;
  post(stream, [=] {
    if (what == Collective::RUNS) {
      work();
    } else {
      comm->shared->hangs = true;
      stall();
      await(comm, 1e9, [] { return false; });  // until it is aborted
    }
    comm->over++;
  });
  return ncclSuccess;
}

struct Grouped {
  ncclComm* comm = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<Transfer> transfers;
};
thread_local int depth = 0;
thread_local Grouped grouped;

ncclResult_t end_group() {
  Grouped all;
  std::swap(all, grouped);
  if (all.transfers.empty()) return ncclSuccess;
  ncclComm* comm = all.comm;
  // What a rank sends to itself travels nowhere.
  std::vector<Transfer> own_sends, own_receives, others;
  for (const Transfer& one : all.transfers)
    (one.peer != comm->rank ? others : one.sends ? own_sends : own_receives).push_back(one);
  if (own_sends.size() != own_receives.size()) return ncclInvalidUsage;
  return begin(comm, all.stream, [=] {
    for (size_t i = 0; i < own_sends.size(); i++)
      memmove(own_receives[i].data, own_sends[i].data, own_sends[i].left);
    exchange(comm, others);
  });
}

ncclResult_t transfer(ncclComm* comm, cudaStream_t stream, Transfer one) {
  grouped.comm = comm;
  grouped.stream = stream;
  grouped.transfers.push_back(one);
  return depth > 0 ? ncclSuccess : end_group();
}

// Leaves together with the others, as NCCL does; who has died or been aborted isn't waited for.
ncclResult_t leave(ncclComm* comm) {
  await(comm, 1e9, [=] { return comm->over == comm->begun; });
  comm->shared->leaving++;
  await(comm, 1e9, [=] {
    if (comm->shared->leaving >= comm->size) return true;
    for (int rank = 0; rank < comm->size; rank++)
      if (kill(comm->shared->pids[rank], 0) != 0) return true;
    return false;
  });
  comm->shared->leaving += MOST_RANKS;  // the others need not come for a second one
  return ncclSuccess;
}

constexpr int ALL = -1;

// Combines what all workers have, `number` elements, on the worker `root` or on ALL. Where it is
// `scattered` each worker has as many for every worker, and gets its own.
ncclResult_t combine(
    const void* own, bool scattered, void* into, size_t number, ncclDataType_t type,
    ncclRedOp_t op, int root, ncclComm* comm, cudaStream_t stream) {
  const Kind kind = kind_of(type);
  if (kind.combine == nullptr || op > ncclAvg) return ncclInvalidArgument;
  return begin(comm, stream, [=] {
    const size_t bytes = number * kind.bytes;
    std::vector<char> all(bytes * comm->size);
    if (!swap(comm, static_cast<const char*>(own), scattered ? bytes : 0, all.data(), bytes)) return;
    if (root == ALL || root == comm->rank)
      kind.combine(all.data(), static_cast<char*>(into), number, comm->size, op);
  });
}

}  // namespace

// --- Communicators

EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION;
  return ncclSuccess;
}
EXPORT const char* ncclGetErrorString(ncclResult_t error) {
  switch (error) {
    case ncclSuccess: return "no error";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    default: return "internal error - please report this issue to the NCCL developers";
  }
}
EXPORT const char* ncclGetLastError(ncclComm_t) { return ""; }
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  const uint64_t token = (static_cast<uint64_t>(random()) << 32) | random();
  memset(id, 0, sizeof *id);
  memcpy(id, &token, sizeof token);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  uint64_t token;
  memcpy(&token, &id, sizeof token);
  return join(comm, token, size, rank);
}
EXPORT ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* comm, int size, ncclUniqueId id, int rank, void*) {
  return ncclCommInitRank(comm, size, id, rank);
}
EXPORT ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, void*) {
  return ncclCommInitRank(comm, size, ids[0], rank);
}
EXPORT ncclResult_t ncclCommSplit(
    ncclComm_t from, int color, int key, ncclComm_t* made, void*) {
  struct Wish {
    int color, key;
  };
  const Wish own{color, key};
  Wish all[MOST_RANKS];
  if (!swap(from, reinterpret_cast<const char*>(&own), 0, reinterpret_cast<char*>(all), sizeof own))
    return ncclInternalError;
  from->splits++;
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int size = 0, rank = 0;
  for (int other = 0; other < from->size; other++) {
    if (all[other].color != color) continue;
    size++;
    rank += all[other].key < key || (all[other].key == key && other < from->rank);
  }
  const uint64_t token = from->token * 1000003 + from->splits * 8191 + color;
  return join(made, token, size, rank);
}
EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
  *size = comm->size;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = comm->error;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) { return leave(comm); }
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return leave(comm); }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;  // it stays: its stream's thread looks at it
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }

// --- Collectives

EXPORT ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupEnd() { return --depth == 0 ? end_group() : ncclSuccess; }
EXPORT ncclResult_t ncclSend(
    const void* data, size_t number, ncclDataType_t type, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  auto* bytes = static_cast<char*>(const_cast<void*>(data));
  return transfer(comm, stream, {peer, true, bytes, number * kind_of(type).bytes});
}
EXPORT ncclResult_t ncclRecv(
    void* data, size_t number, ncclDataType_t type, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  auto* bytes = static_cast<char*>(data);
  return transfer(comm, stream, {peer, false, bytes, number * kind_of(type).bytes});
}
EXPORT ncclResult_t ncclAllReduce(
    const void* own, void* into, size_t number, ncclDataType_t type, ncclRedOp_t op,
    ncclComm_t comm, cudaStream_t stream) {
  return combine(own, false, into, number, type, op, ALL, comm, stream);
}
EXPORT ncclResult_t ncclReduce(
    const void* own, void* into, size_t number, ncclDataType_t type, ncclRedOp_t op, int root,
    ncclComm_t comm, cudaStream_t stream) {
  return combine(own, false, into, number, type, op, root, comm, stream);
}
EXPORT ncclResult_t ncclReduceScatter(
    const void* own, void* into, size_t number, ncclDataType_t type, ncclRedOp_t op,
    ncclComm_t comm, cudaStream_t stream) {
  return combine(own, true, into, number, type, op, ALL, comm, stream);
}
EXPORT ncclResult_t ncclAllGather(
    const void* own, void* into, size_t number, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t stream) {
  return begin(comm, stream, [=] {
    const size_t bytes = number * kind_of(type).bytes;
    swap(comm, static_cast<const char*>(own), 0, static_cast<char*>(into), bytes);
  });
}
EXPORT ncclResult_t ncclAlltoAll(
    const void* own, void* into, size_t number, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t stream) {
  return begin(comm, stream, [=] {
    const size_t bytes = number * kind_of(type).bytes;
    swap(comm, static_cast<const char*>(own), bytes, static_cast<char*>(into), bytes);
  });
}
EXPORT ncclResult_t ncclBroadcast(
    const void* own, void* into, size_t number, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
  return begin(comm, stream, [=] {
    const size_t bytes = number * kind_of(type).bytes;
    auto* from = static_cast<char*>(const_cast<void*>(own));
    std::vector<Transfer> transfers;
    if (comm->rank != root) transfers.push_back({root, false, static_cast<char*>(into), bytes});
    for (int peer = 0; comm->rank == root && peer < comm->size; peer++)
      if (peer != root) transfers.push_back({peer, true, from, bytes});
    if (comm->rank == root) memmove(into, own, bytes);
    exchange(comm, std::move(transfers));
  });
}
EXPORT ncclResult_t ncclBcast(
    void* data, size_t number, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
  return ncclBroadcast(data, data, number, type, root, comm, stream);
}

// --- Memory, and operations that aren't there

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes);
EXPORT cudaError_t cudaFree(void* pointer);
EXPORT ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
EXPORT ncclResult_t ncclMemFree(void* pointer) {
  cudaFree(pointer);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t*, void*, ncclDataType_t, int, ncclComm_t) {
  return ncclInvalidUsage;
}
EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
