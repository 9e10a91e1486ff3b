// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The message of one bucket: gathers its gradients into a buffer and hands the averages out.
/// Without autograd and communication.

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel::detail {

struct MessageOptions {
  bool gradient_as_bucket_view = false;  ///< leave gradients as views of the buffer
  bool allreduce_always_fp32 = false;    ///< half and bfloat16 gradients are summed as float32
  int64_t tail = 0;                      ///< elements of the message after its gradients
  /// Allocates zeroed memory for the buffer: (elements, options). Empty: torch's allocator.
  std::function<at::Tensor(int64_t, const at::TensorOptions&)> allocate;
};

/// The real-valued dtype in which gradients of `dtype` are summed.
at::ScalarType message_dtype(at::ScalarType dtype, bool always_fp32);

/// The message of one bucket of dense gradients. In each backward:
///
///     put() for any gradient -> pack() -> tensor() is reduced -> unpack()
///
/// From put() or pack() to unpack(), .grad of a used member is an alias of its place in the buffer:
/// see Note [Gradients in their bucket]. All member functions work on the current stream of the
/// message's device and never block the host. Not thread safe.
class BucketMessage {
 public:
  /// The position of a gradient in the message.
  struct Slot {
    int64_t parameter;    ///< index of the parameter in the reducer
    at::Tensor variable;  ///< the parameter
    at::Tensor like;      ///< on `meta`: its shape, strides and dtype when the message was made
    int64_t offset = 0;   ///< first element in the buffer
    int64_t numel = 0;    ///< elements of the gradient
    /// A view of the buffer with the parameter's shape, strides and dtype. It is never handed out,
    /// because the user may redirect a gradient (`grad.data = ...`), which changes every reference
    /// to the same tensor.
    at::Tensor view;
    at::Tensor own;     ///< .grad until an alias replaced it, if it is kept until unpack()
    bool kept = false;  ///< `own` is from before this backward
    at::Tensor stash;   ///< the value of an unused gradient, until no rank is known to use it
    bool used = false;  ///< this rank contributes a gradient in this backward
  };

  /// @param parameters  indices of the members; one dtype, one device.
  /// @param variables   the members' parameters, in the same order.
  /// @param device      where the buffer lives.
  BucketMessage(const std::vector<int64_t>& parameters, const std::vector<at::Tensor>& variables,
                at::Device device, MessageOptions options);

  at::Device device() const { return device_; }
  const std::vector<Slot>& slots() const { return slots_; }

  /// The real-valued dtype in which gradients are summed.
  at::ScalarType dtype() const { return dtype_; }

  /// Elements of gradients in the message.
  int64_t numel() const { return numel_; }

  /// Copies the gradient of `slots()[index]` into the buffer before pack(), because it is still in
  /// the cache right after it was computed. Its memory is then free for the next gradients.
  /// @param kept  whether .grad was defined before this backward.
  void put(size_t index, bool kept);

  /// Copies the gradients that are not in the buffer yet, by one multi-tensor copy, and multiplies
  /// all of them by `scale`.
  /// @param used  by parameter index: whether this rank contributes. A used member has a gradient.
  ///              An unused member contributes its current gradient, or zeros without one.
  /// @param kept  by parameter index: whether .grad was defined before this backward.
  void pack(const std::vector<uint8_t>& used, const std::vector<uint8_t>& kept, double scale);

  /// Makes tensor() the message of a rank that contributes nothing to this bucket: zeros, or NaN
  /// with `poison`, for devices on which reports are not read. Gradients are this rank's own again.
  /// This rank may be out of memory, so memory is allocated only if a gradient lies in the buffer.
  void blank(bool poison);

  /// The tensor to reduce, valid after pack() and blank(): contiguous and real-valued.
  const at::Tensor& tensor() const { return buffer_; }

  /// Parts of tensor(): the gradients, the tail after them, and views of single gradients, by slot.
  at::Tensor gradients_of(const at::Tensor& tensor) const { return tensor.narrow(0, 0, numel_); }
  at::Tensor tail_of(const at::Tensor& tensor) const {
    return tensor.narrow(0, numel_, options_.tail);
  }
  bool has_tail() const { return options_.tail > 0; }
  std::vector<at::Tensor> views_of(const at::Tensor& gradients) const;

  /// The memory [numel()] of which gradients are views with gradient_as_bucket_view. Undefined
  /// before the first pack().
  at::Tensor gradients_buffer() const;

  /// Replaces the gradients by `result`, which has the same number of elements and any dtype.
  /// @throws InvalidArgument for another number of elements.
  void assign(const at::Tensor& result);

  /// Multiplies the gradients by `scale` (0 also clears NaN) and hands them out, as views of the
  /// buffer or by one multi-tensor copy. Members that this rank did not use get the reduced
  /// gradient if `used_by_any` is set for them. Otherwise they stay as they were before pack()
  /// (None stays None).
  void unpack(double scale, const std::vector<uint8_t>& used_by_any);

  /// Drops the buffer and a message in flight, so that late writes to it stay invisible. Gradients
  /// are this rank's own again; after pack() they are undefined with gradient_as_bucket_view.
  void abandon();

  /// The number of gradients that were copied in the last backward.
  int64_t copied() const { return copied_; }

 private:
  void open();
  void give_back();
  void allocate();
  bool is_held() const;
  at::Tensor source_of(const at::Tensor& grad) const;
  void alias(Slot& slot, bool kept);
  void hand_out(Slot& slot, std::vector<at::Tensor>& targets, std::vector<at::Tensor>& sources);
  bool has_home() const { return home_.data_ptr() != buffer_.data_ptr(); }

  at::Device device_;
  MessageOptions options_;
  std::vector<Slot> slots_;
  at::ScalarType dtype_;  ///< real-valued
  int64_t numel_ = 0;     ///< in elements of dtype_
  at::Tensor buffer_;     ///< gradients, then the tail; in dtype_
  at::Tensor home_;       ///< memory of the views: buffer_, unless gradients have another dtype
  bool open_ = false;     ///< the buffer has gradients of this backward
  bool packed_ = false;   ///< between pack() and unpack()
  int64_t copied_ = 0;
};

}  // namespace apex::parallel::detail
