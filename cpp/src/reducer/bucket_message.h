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
  int64_t sparse_dim = 1;                ///< of a sparse message: the same on every rank
  int64_t tail = 0;                      ///< elements of a flat message after its gradients
  /// Allocates zeroed memory for the buffer: (elements, options). Empty: torch's allocator.
  std::function<at::Tensor(int64_t, const at::TensorOptions&)> allocate;
};

/// The real-valued dtype in which gradients of `dtype` are summed.
at::ScalarType message_dtype(at::ScalarType dtype, bool always_fp32);

/// The message of one bucket. All member functions work on the current stream of the message's
/// device and never block the host. Not thread safe.
class BucketMessage {
 public:
  enum class Kind {
    kFlat,     ///< gradients are copied into one buffer (or are views of it)
    kInPlace,  ///< a single dense gradient, reduced in place
    kSparse,   ///< a single gradient with sparse layout
  };

  /// The position of a gradient in the message.
  struct Slot {
    int64_t parameter;    ///< index of the parameter in the reducer
    at::Tensor variable;  ///< the parameter
    int64_t offset = 0;   ///< first element in the buffer
    int64_t numel = 0;    ///< elements of the gradient
    /// A view of the buffer with the parameter's shape, strides and dtype. It is never handed out,
    /// because the user may redirect a gradient (`grad.data = ...`), which changes every reference
    /// to the same tensor.
    at::Tensor view;
    at::Tensor handed;  ///< the last alias of `view` that was handed out
    at::Tensor stash;   ///< the value of an unused gradient, until no rank is known to use it
    bool used = false;  ///< this rank contributes a gradient in this backward
    at::Tensor
        early;  ///< the gradient that copy_early() has copied and left in place, until pack()
    uint32_t early_version = 0;  ///< its version at that time
    double early_scale = 1.0;    ///< the factor of copy_early()
    bool moved = false;          ///< copy_early() took the gradient away, until unpack()
  };

  /// @param parameters  indices of the members; one dtype, one device.
  /// @param variables   the members' parameters, in the same order.
  /// @param device      where the buffer lives.
  BucketMessage(Kind kind, const std::vector<int64_t>& parameters,
                const std::vector<at::Tensor>& variables, at::Device device,
                const MessageOptions& options);

  Kind kind() const { return kind_; }
  bool is_sparse() const { return kind_ == Kind::kSparse; }
  at::Device device() const { return device_; }
  const std::vector<Slot>& slots() const { return slots_; }

  /// The real-valued dtype in which gradients are summed.
  at::ScalarType dtype() const { return dtype_; }

  /// Elements of gradients in the message.
  int64_t numel() const { return numel_; }

  /// Copies the gradient of `slots()[index]`, times `scale`, before pack(), because it is still in
  /// the cache right after it was computed. Works only on the CPU, and only if the copy is one pass
  /// over the memory; otherwise does nothing. pack() copies a gradient again if it has changed
  /// since. With gradient_as_bucket_view the gradient is taken away from its parameter, which gets
  /// the view in unpack().
  void copy_early(size_t index, double scale);

  /// Call it before a backward adds to gradients. A gradient that the user has moved to the
  /// position of another one, in a buffer of `all`, gets its own memory.
  void move_misplaced(const std::vector<const BucketMessage*>& all);

  /// Gathers the members' gradients into the message and multiplies by `scale`.
  ///
  /// This is at most one multi-tensor copy. Gradients that already are views of the buffer are not
  /// copied. The gradient of a message in place is not copied if only its parameter and `incoming`
  /// refer to its memory (see Note [Who may read a gradient's memory] in the source).
  /// @param used  by parameter index: whether this rank contributes. A used member has a gradient.
  ///              An unused member contributes its current gradient, or zeros without one.
  /// @param incoming  the gradient that autograd is accumulating now, if there is one.
  void pack(const std::vector<uint8_t>& used, double scale, const at::Tensor& incoming = {});

  /// The message of a rank that contributes nothing to this bucket: zeros, or NaN with `poison`,
  /// for devices on which reports are not read. Undefined for a sparse message.
  ///
  /// This rank may be out of memory. So the result uses the message's own buffer, if there is one
  /// and it holds no gradient. Otherwise it is a new tensor. No gradient changes.
  /// @param idle  no reduction uses the buffer.
  at::Tensor absent(bool poison, bool idle);

  /// The tensor to reduce, valid between pack() and unpack(): contiguous, real-valued, or sparse.
  const at::Tensor& tensor() const { return tensor_; }

  /// Parts of tensor(), or of the result of absent(): the gradients, the tail after them, and views
  /// of single gradients, by slot.
  at::Tensor gradients_of(const at::Tensor& tensor) const { return tensor.narrow(0, 0, numel_); }
  at::Tensor tail_of(const at::Tensor& tensor) const {
    return tensor.narrow(0, numel_, options_.tail);
  }
  bool has_tail() const { return options_.tail > 0; }
  std::vector<at::Tensor> views_of(const at::Tensor& gradients) const;

  /// The buffer [numel()], of which gradients are views with gradient_as_bucket_view. For a message
  /// in place, a flat alias of the gradient. Undefined before the first pack().
  at::Tensor gradients_buffer();

  /// Replaces the gradients by `result`, which has the same number of elements and any dtype.
  /// Replaces a sparse message by the reduced tensor.
  /// @throws InvalidArgument for another number of elements.
  void assign(const at::Tensor& result);

  /// Multiplies the gradients by `scale` and hands them to the used members, as views of the buffer
  /// or by one multi-tensor copy. Members that this rank did not use are left for settle().
  /// @param kept  by parameter index: whether .grad was defined before this backward.
  void unpack(double scale, const std::vector<uint8_t>& kept);

  /// Call it after unpack(). Members that this rank did not use get the reduced gradient if
  /// `used_by_any` is set for them. Otherwise they stay as they were before pack() (None stays
  /// None).
  void settle(const std::vector<uint8_t>& used_by_any);

  /// True if a member was not used by this rank in the last pack().
  bool has_unused() const { return has_unused_; }

  /// Drops a message that is in flight, so that late writes to it stay invisible. A gradient in the
  /// buffer is taken away from its parameter. Gradients that were moved into a bucket, or are views
  /// of it, and were not packed yet become tensors of their own again.
  void abandon();

  /// The number of gradients that the last pack() copied, and how many of them copy_early() had
  /// copied.
  int64_t copied() const { return copied_; }
  int64_t copied_early() const { return copied_early_; }

 private:
  void allocate();
  void pack_flat(double scale);
  void move_in(std::vector<Slot*>& slots, std::vector<at::Tensor>& targets,
               std::vector<at::Tensor>& sources, double scale, bool is_new);
  void pack_in_place(double scale, const at::Tensor& incoming);
  void let_go();
  bool gradients_lie_in_buffer() const;
  void pack_sparse(double scale);
  bool is_copied(const Slot& slot, double scale) const;
  bool has_home() const { return home_.data_ptr() != buffer_.data_ptr(); }
  at::Tensor view_as_gradient(Slot& slot) const;

  Kind kind_;
  at::Device device_;
  MessageOptions options_;
  std::vector<Slot> slots_;
  at::ScalarType dtype_ = at::kFloat;  ///< real-valued
  int64_t numel_ = 0;                  ///< in elements of dtype_
  at::Tensor buffer_;                  ///< flat: gradients, then the tail; in dtype_
  at::Tensor home_;      ///< memory of the views: buffer_, unless gradients have another dtype
  at::Tensor tensor_;    ///< the tensor to reduce in this backward
  bool packed_ = false;  ///< between pack() and unpack()
  bool has_unused_ = false;
  double owed_scale_ = 1.0;  ///< the factor that the copy out of buffer_ still applies
  int64_t copied_ = 0;
  int64_t copied_early_ = 0;
};

}  // namespace apex::parallel::detail
