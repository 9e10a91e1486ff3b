// SPDX-License-Identifier: BSD-3-Clause
#include "support/cuda_emulator/cuda_emulator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "emulated/emulated_launch.h"

// What the emulator computes and what it detects.

namespace apex::testing::cuda {
namespace {

class CudaEmulator : public ::testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { set_order(GetParam()); }
  void TearDown() override { set_order(0); }
};
INSTANTIATE_TEST_SUITE_P(Orders, CudaEmulator, ::testing::Values(0, 1, 7));

inline __global__ void index_kernel(int* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] =
      static_cast<int>(blockIdx.x * 1000 + threadIdx.x + gridDim.x * 100000);
}

TEST_P(CudaEmulator, Threads_EachRunsOnce_WithItsOwnIndex) {
  std::vector<int> out(3 * 64, -1);
  ASSERT_EQ(launch(3, 64, index_kernel, out.data()), cudaSuccess);
  for (int i = 0; i < 3 * 64; ++i) {
    EXPECT_EQ(out[i], 300000 + i / 64 * 1000 + i % 64);
  }
}

/// Reverses 128 values of a block through shared memory.
template <bool kWait>
__global__ void reverse_kernel(int* values) {
  __shared__ int copy[128];
  copy[threadIdx.x] = values[blockIdx.x * 128 + threadIdx.x];
  if (kWait) {
    __syncthreads();
  }
  values[blockIdx.x * 128 + threadIdx.x] = copy[127 - threadIdx.x];
}

int wrong_after_reverse(void (*kernel)(int*)) {
  std::vector<int> values(2 * 128);
  for (int i = 0; i < 256; ++i) {
    values[i] = i;
  }
  EXPECT_EQ(launch(2, 128, kernel, values.data()), cudaSuccess);
  int wrong = 0;
  for (int i = 0; i < 256; ++i) {
    wrong += values[i] != i / 128 * 128 + 127 - i % 128;
  }
  return wrong;
}

TEST_P(CudaEmulator, Barrier_SharedMemory_IsThereForAllThreads) {
  EXPECT_EQ(wrong_after_reverse(reverse_kernel<true>), 0);
}

TEST_P(CudaEmulator, Barrier_Missing_GivesWrongResults) {
  EXPECT_GT(wrong_after_reverse(reverse_kernel<false>), 0);
}

template <int kThreads>
__global__ void uninitialized_kernel(double* out) {
  __shared__ double never[kThreads];
  out[threadIdx.x] = never[threadIdx.x];
  never[threadIdx.x] = 1;
}

TEST_P(CudaEmulator, SharedMemory_BeforeItIsWritten_IsNaNInEveryBlock) {
  std::vector<double> out(32);
  ASSERT_EQ(launch(2, 32, uninitialized_kernel<32>, out.data()), cudaSuccess);
  for (const double value : out) {
    EXPECT_TRUE(std::isnan(value));
  }
}

inline __global__ void butterfly_kernel(double* out) {
  double sum = threadIdx.x;
  for (int offset = 1; offset < 32; offset *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  out[threadIdx.x] = sum;
}

TEST_P(CudaEmulator, Exchange_Butterfly_SumsEachWarp) {
  std::vector<double> out(96);
  ASSERT_EQ(launch(1, 96, butterfly_kernel, out.data()), cudaSuccess);
  for (int i = 0; i < 96; ++i) {
    EXPECT_EQ(out[i], 31 * 16 + 32 * (i / 32) * 32);
  }
}

inline __global__ void last_block_kernel(unsigned* counter, int* last) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (threadIdx.x == 31 && is_last) {
    ++*last;
  }
}

TEST_P(CudaEmulator, AtomicInc_EveryBlockOnce_WrapsToZeroAndOneIsLast) {
  unsigned counter = 0;
  int last = 0;
  ASSERT_EQ(launch(5, 32, last_block_kernel, &counter, &last), cudaSuccess);
  EXPECT_EQ(counter, 0u);
  EXPECT_EQ(last, 1);
}

/// The last block adds up what all blocks wrote.
template <bool kWait>
__global__ void sum_kernel(int* values, unsigned* counter, int* sum) {
  __shared__ bool is_last;
  values[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  if (kWait) {
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) {
    for (unsigned i = 0; i < gridDim.x * blockDim.x; ++i) {
      *sum += values[i];
    }
  }
}

int sum_of_ones(void (*kernel)(int*, unsigned*, int*)) {
  std::vector<int> values(6 * 64);
  unsigned counter = 0;
  int sum = 0;
  EXPECT_EQ(launch(6, 64, kernel, values.data(), &counter, &sum), cudaSuccess);
  return sum;
}

TEST_P(CudaEmulator, Blocks_ThatHandOver_AreSeenWhole) {
  EXPECT_EQ(sum_of_ones(sum_kernel<true>), 6 * 64);
}

TEST(CudaEmulatorBlocks, HandOver_BeforeAllThreadsHaveWritten_LosesValues) {
  int lost = 0;
  for (uint64_t seed = 2; seed < 42; ++seed) {
    set_order(seed);
    lost += 6 * 64 - sum_of_ones(sum_kernel<false>);
  }
  set_order(0);
  EXPECT_GT(lost, 0);
}

inline __global__ void skipped_barrier_kernel() {
  if (threadIdx.x < 40) {
    __syncthreads();
  }
}

TEST_P(CudaEmulator, Barrier_NotReachedByAll_IsAnError) {
  EXPECT_EQ(launch(1, 64, skipped_barrier_kernel), cudaErrorLaunchFailure);
  EXPECT_NE(last_error().find("from thread 40 on over"), std::string::npos) << last_error();
}

inline __global__ void divided_barrier_kernel() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

TEST_P(CudaEmulator, Barrier_InTwoPlaces_IsAnError) {
  EXPECT_EQ(launch(1, 64, divided_barrier_kernel), cudaErrorLaunchFailure);
  EXPECT_NE(last_error().find("a barrier in different places"), std::string::npos) << last_error();
}

inline __global__ void half_warp_kernel(int* out) {
  if (threadIdx.x % 32 < 16) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
  }
}

TEST_P(CudaEmulator, Exchange_WithoutSomeLanes_IsAnError) {
  std::vector<int> out(64);
  EXPECT_EQ(launch(1, 64, half_warp_kernel, out.data()), cudaErrorLaunchFailure);
  EXPECT_NE(last_error().find("in an exchange"), std::string::npos) << last_error();
}

TEST_P(CudaEmulator, Launch_AfterAnError_IsRight) {
  EXPECT_EQ(launch(1, 64, skipped_barrier_kernel), cudaErrorLaunchFailure);
  EXPECT_EQ(wrong_after_reverse(reverse_kernel<true>), 0);
}

TEST_P(CudaEmulator, Launch_OfNothingOrTooMuch_IsAnInvalidConfiguration) {
  EXPECT_EQ(launch(0, 64, skipped_barrier_kernel), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, 2048, skipped_barrier_kernel), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, 33, skipped_barrier_kernel), cudaErrorInvalidConfiguration);
}

}  // namespace
}  // namespace apex::testing::cuda
