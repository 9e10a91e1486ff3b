// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <support/race_detector.h>

/// A device that is not there, under torch's PrivateUse1 key: tensors lie in host memory and
/// operators run at once, so that values are right, but each is entered into a RaceDetector under
/// the stream that is current on the calling thread, as if streams ran apart. A program that is
/// right here orders its streams by events, keeps memory for them, and waits on the host only where
/// the detector says so.
///
/// Linking fake_device.cpp and fake_operators.cpp into a program makes it torch's accelerator
/// there: autograd then runs each node on the stream of its forward and orders the streams, as on a
/// GPU.
///
/// What waits on the host: reading a value (item()), copies to and from the CPU unless they are
/// non_blocking, and synchronizing events, streams and the device.
namespace apex::testing::fake {

/// The one device.
c10::Device device();

c10::Stream current_stream();
/// A new stream, ordered with no other.
c10::Stream new_stream(const std::string& name);

/// Makes `later` wait for what `earlier` has been asked for so far.
void order(const c10::Stream& earlier, const c10::Stream& later);

/// Whether events have times; off at first. One operation of any stream is a millisecond: the time
/// of an event is how many are over when it is.
void set_timed_events(bool on);

/// Allocations of more bytes throw c10::OutOfMemoryError from now on; at first none does.
void set_largest_block(size_t bytes);

/// Blocks of memory that are allocated now.
size_t allocated_blocks();
/// Memory from outside of torch's allocator, for good; not counted above.
void* allocate_for_good(size_t bytes);

RaceDetector& detector();

/// The memory of a tensor of this device as a tensor of the CPU, behind the detector's back.
at::Tensor host_alias(const at::Tensor& tensor);

/// Its value, behind the detector's back: for looking at results without ordering anything.
at::Tensor peek(const at::Tensor& tensor);

/// Computes one operation that is not torch's, by `compute`, and tells the detector of it, and the
/// capture in progress (fake_capture.h), which keeps `compute` and the tensors.
void operate(
    const c10::Stream& stream, const std::string& what, const std::vector<at::Tensor>& reads,
    const std::vector<at::Tensor>& writes, const std::function<void()>& compute = [] {});

/// Bytes of the device's memory.
struct Region {
  const void* data;
  size_t bytes;
  bool writes;
};
/// The same of an operation that is known by addresses only. Memory that is not the device's is an
/// error.
void operate(const c10::Stream& stream, const std::string& what, const std::vector<Region>& regions,
             const std::function<void()>& compute);

/// What is over when all that a stream has been asked for so far is over.
struct Mark {
  RaceDetector::Clock clock;
  int64_t capture = 0;  ///< that the stream took part in, or 0
};
Mark record(const c10::Stream& stream);
void wait(const c10::Stream& stream, const Mark& mark);
/// Whether the host knows.
bool query(const Mark& mark);

/// What an operation does to the bytes of a tensor, from its first to its last element; nothing if
/// it has none.
std::vector<RaceDetector::Access> access(const at::Tensor& tensor, bool writes);

/// Keeps the memory behind a tensor for `stream`; what Tensor::record_stream() does.
void used_on(const at::Tensor& tensor, const c10::Stream& stream);

}  // namespace apex::testing::fake
