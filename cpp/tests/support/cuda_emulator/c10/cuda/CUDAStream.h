// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include <c10/core/Stream.h>

#include <support/fake_device.h>

/// Stand-in for torch's header of this name: the streams of the fake device.

namespace c10::cuda {

class CUDAStream {
 public:
  explicit CUDAStream(const c10::Stream& stream) : stream_(stream) {}
  c10::DeviceIndex device_index() const { return stream_.device_index(); }
  c10::StreamId id() const { return stream_.id(); }
  /// The stream's number, not an address.
  cudaStream_t stream() const { return reinterpret_cast<cudaStream_t>(stream_.id()); }

 private:
  c10::Stream stream_;
};

inline CUDAStream getCurrentCUDAStream() {
  return CUDAStream(apex::testing::fake::current_stream());
}

}  // namespace c10::cuda

inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = apex::testing::fake::allocate_for_good(bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  apex::testing::fake::operate(c10::Stream(c10::Stream::UNSAFE, apex::testing::fake::device(),
                                           reinterpret_cast<c10::StreamId>(stream)),
                               "memset", {apex::testing::fake::Region{data, bytes, true}},
                               [=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}
