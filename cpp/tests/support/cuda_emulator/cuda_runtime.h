// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

/// Stand-in for CUDA's header of this name. It lets a host compiler compile device code, and runs
/// kernels on the host (cuda_emulator.h). Declares only the parts of CUDA that this project's
/// kernels use.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// The emulator runs all blocks on one thread and swaps that thread's thread_local variables per
// block.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
};

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
using cudaStream_t = struct CUstream_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

/// A small device, so that tests of moderate size share channels.
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxThreadsPerMultiProcessor };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 3 : 1024;
  return cudaSuccess;
}

namespace apex::testing::cuda::detail {

struct Device {
  int number = 0;
  int resident_threads = 2048;  // per multiprocessor, for every kernel
};
Device& device();

/// The place in a kernel where a thread waits.
struct Place {
  const char* file;
  int line;
};

cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread);
void barrier(const Place& where);
/// The value of lane `lane ^ lane_mask` of the thread's warp.
uint64_t exchange(unsigned mask, uint64_t value, int lane_mask, const Place& where);

}  // namespace apex::testing::cuda::detail

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = apex::testing::cuda::detail::device().number;
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int threads,
                                                          size_t) {
  *blocks = apex::testing::cuda::detail::device().resident_threads / threads;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  // Each thread gets its own copy of the parameters.
  return apex::testing::cuda::detail::run(*config, [&] { kernel(arguments...); });
}

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  apex::testing::cuda::detail::barrier({file, line});
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = apex::testing::cuda::detail::exchange(mask, bits, lane_mask, {file, line});
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
