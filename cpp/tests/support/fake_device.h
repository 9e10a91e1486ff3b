// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <support/race_detector.h>

/// A simulated accelerator under torch's PrivateUse1 key. Tensors are in host memory and operators
/// run immediately, so values are correct. Each operator is also entered into a RaceDetector under
/// the calling thread's current stream, as if streams ran concurrently. A program passes if it
/// orders its streams by events, keeps memory alive for them, and waits on the host only where the
/// test expects it.
///
/// Linking fake_device.cpp and fake_operators.cpp into a program makes the device torch's
/// accelerator: autograd then runs each node on the stream of its forward and orders the streams,
/// as on a GPU.
///
/// The host waits in item(), in copies from and to the CPU that are not non_blocking, and in
/// synchronization of events and streams.
namespace apex::testing::fake {

/// The only device.
c10::Device device();

c10::Stream current_stream();
/// A new stream without ordering to other streams.
c10::Stream new_stream(const std::string& name);

/// Makes `later` wait for the work enqueued on `earlier` so far.
void order(const c10::Stream& earlier, const c10::Stream& later);

/// Larger allocations throw c10::OutOfMemoryError from now on. No limit by default.
void set_largest_block(size_t bytes);

/// Memory that is never freed.
void* allocate_for_good(size_t bytes);

RaceDetector& detector();

/// A CPU tensor on the memory of a tensor of this device, unseen by the detector.
at::Tensor host_alias(const at::Tensor& tensor);

/// Its value, unseen by the detector: for checking results without ordering streams.
at::Tensor peek(const at::Tensor& tensor);

/// Runs `compute`, an operation that is not torch's. Enters it into the detector and into the
/// capture in progress (fake_capture.h), which keeps `compute` and the tensors.
void operate(
    const c10::Stream& stream, const std::string& what, const std::vector<at::Tensor>& reads,
    const std::vector<at::Tensor>& writes, const std::function<void()>& compute = [] {});

/// A byte range in the device's memory.
struct Region {
  const void* data;
  size_t bytes;
  bool writes;
};
/// The same for an operation that is known only by addresses. Throws for memory outside the device.
void operate(const c10::Stream& stream, const std::string& what, const std::vector<Region>& regions,
             const std::function<void()>& compute);

/// A point in a stream: complete once all work enqueued before it is complete.
struct Mark {
  RaceDetector::Clock clock;
  int64_t capture = 0;  ///< the capture that the stream was part of, or 0
};
Mark record(const c10::Stream& stream);
void wait(const c10::Stream& stream, const Mark& mark);
/// Whether the host knows that `mark` is complete.
bool query(const Mark& mark);

/// The access of an operation to the bytes of a tensor, from its first to its last element; empty
/// for an empty tensor.
std::vector<RaceDetector::Access> access(const at::Tensor& tensor, bool writes);

/// Keeps a tensor's memory alive for `stream`; implements Tensor::record_stream().
void used_on(const at::Tensor& tensor, const c10::Stream& stream);

}  // namespace apex::testing::fake
