// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What the built-in communication hooks share.

#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace apex::parallel::detail {

inline c10::intrusive_ptr<c10::ivalue::Future> completed(const at::Tensor& value) {
  std::vector<c10::Device> devices;
  if (!value.is_cpu()) devices.push_back(value.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
  future->markCompleted(c10::IValue(value));
  return future;
}

/// A future that completes with `value` after `collective`, a future whose own value is
/// unspecified. An error of `collective` becomes its error.
inline c10::intrusive_ptr<c10::ivalue::Future> then(c10::ivalue::Future& collective,
                                                    const at::Tensor& value) {
  return collective.then(
      [value](c10::ivalue::Future& done) {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        return c10::IValue(value);
      },
      c10::TensorType::get());
}

/// A device stream for the collectives of one hook, and for what waits for them. Backward goes on
/// meanwhile.
class SideStream {
 public:
  /// Calls `call()` with this stream as the current one, after what is enqueued on the current
  /// stream of the device of `tensor`, which `call` uses.
  template <typename Call>
  auto run(const at::Tensor& tensor, Call&& call) {
    const c10::Device device = tensor.device();
    const c10::impl::VirtualGuardImpl guard_of(device.type());
    if (!stream_) stream_ = guard_of.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    c10::Event produced(device.type());
    produced.record(guard_of.getStream(device));
    produced.block(*stream_);
    const c10::StreamGuard guard(*stream_);
    tensor.record_stream(*stream_);
    return call();
  }

 private:
  std::optional<c10::Stream> stream_;
};

}  // namespace apex::parallel::detail
