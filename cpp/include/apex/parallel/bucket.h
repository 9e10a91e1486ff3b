#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <apex/export.h>

/// One message of a backward: a flat buffer with room for several gradients, or one gradient that is
/// reduced where it lies. Knows nothing of autograd or communication.

namespace apex::parallel {

struct BucketOptions {
  bool gradient_as_bucket_view = false;  ///< leave gradients as views of the buffer
  bool allreduce_always_fp32 = false;    ///< half and bfloat16 gradients travel as float32
  int64_t sparse_dim = 1;                ///< of a sparse bucket: the same on every rank
  bool stamped = false;                  ///< one more number tells in which step a rank is
  bool signals = false;                  ///< one more number tells whether a rank asks for something
  /// Where the memory of the buffer comes from, zeroed: (elements, options). Empty: from torch.
  std::function<at::Tensor(int64_t, const at::TensorOptions&)> allocate;
};

/// What a rank tells the others in the numbers behind the gradients, where the bucket has room for it.
struct BucketNumbers {
  int stamp = 0;        ///< of a stamped bucket: from 0 to 7
  bool signal = false;  ///< of a bucket that signals
};

/// A group of gradients that are reduced by one collective.
///
/// Besides gradients a flat bucket carries one number per *reported* parameter: 1 where this rank has
/// a gradient for it and 0 where it has not, so that after the sum every rank can tell whether any
/// rank had one, without a collective of its own. See Note [Usage travels with the gradients] in
/// reducer.cpp.
///
/// All member functions work on the current stream of the bucket's device and never block the host,
/// except reported_usage(). Not thread safe; the reducer serializes calls.
class APEX_API Bucket {
 public:
  enum class Kind {
    kFlat,     ///< gradients are copied into one buffer (or are views of it)
    kInPlace,  ///< a single dense gradient, reduced where it lies
    kSparse,   ///< a single gradient with sparse layout
    kUsage,    ///< no gradients, only usage numbers
  };

  /// A gradient's place in the bucket.
  struct Slot {
    int64_t parameter;    ///< index of the parameter in the reducer
    at::Tensor variable;  ///< the parameter
    int64_t offset = 0;   ///< first element in the buffer
    int64_t numel = 0;    ///< elements of the gradient
    at::Tensor view;      ///< the buffer seen with the parameter's shape, strides and dtype
    at::Tensor stash;     ///< an unused gradient's value, kept until it is known to be unused by all
    bool used = false;    ///< this rank contributes a gradient in this backward
    at::Tensor early;     ///< the gradient that copy_early() has copied and left in place, until pack()
    uint32_t early_version = 0;  ///< its version then
    double early_scale = 1.0;    ///< what copy_early() multiplied by
    bool moved = false;          ///< copy_early() took the gradient away, until unpack()
  };

  /// @param parameters    indices of the members; one dtype, one device.
  /// @param variables     the members' parameters, in the same order.
  /// @param reported      parameters whose usage numbers travel here (flat and usage buckets).
  /// @param device        where the buffer lives.
  Bucket(Kind kind, const std::vector<int64_t>& parameters,
         const std::vector<at::Tensor>& variables, std::vector<int64_t> reported,
         at::Device device, const BucketOptions& options);

  Kind kind() const { return kind_; }
  at::Device device() const { return device_; }
  const std::vector<Slot>& slots() const { return slots_; }
  const std::vector<int64_t>& reported() const { return reported_; }
  bool stamped() const { return options_.stamped; }
  bool signals() const { return options_.signals; }

  /// The real-valued dtype in which gradients are summed.
  at::ScalarType wire_dtype() const { return wire_dtype_; }

  /// Elements of gradients on the wire, padding included, usage numbers not.
  int64_t data_numel() const { return data_numel_; }

  /// Copies the gradient of `slots()[index]`, times `scale`, ahead of pack(): right after it was computed
  /// it is still in the cache. Only on the CPU, and only where that is one pass over the memory; otherwise
  /// does nothing. pack() copies again what has changed since. With gradient_as_bucket_view the gradient
  /// is taken away from its parameter, which gets the view in unpack().
  void copy_early(size_t index, double scale);

  /// Gathers the members' gradients into the message and multiplies by `scale`.
  ///
  /// @param used  by parameter index of the reducer: whether this rank contributes; a used member has
  ///              a gradient. A member that is not used contributes its present gradient if it has
  ///              one, else zeros.
  /// One multi-tensor copy at most; gradients that already are views of the buffer, and a bucket in
  /// place, are not copied.
  void pack(const std::vector<uint8_t>& used, double scale, const BucketNumbers& numbers = {});

  /// The tensor to reduce, valid between pack() and unpack(): contiguous, real-valued, or sparse.
  const at::Tensor& message() const { return message_; }

  /// The buffer that gradients are views of with gradient_as_bucket_view, [data_numel]; of a bucket in
  /// place, the gradient as a flat alias. Undefined before the first pack().
  at::Tensor gradients_buffer() const;

  /// The gradients' part of the buffer [data_numel] and its views, for communication hooks. Between
  /// pack() and unpack() of a flat or in-place bucket.
  at::Tensor data() const;
  std::vector<at::Tensor> data_views() const;

  /// Replaces the gradients' part of the message by `result`: same number of elements, any dtype.
  void assign(const at::Tensor& result);

  /// Of a sparse bucket: replaces the message by the reduced tensor.
  void assign_sparse(at::Tensor result);

  /// Multiplies the message by `scale` and hands every used member its gradient: as a view of the
  /// buffer, or by one multi-tensor copy. Members that this rank did not use are left for settle().
  void unpack(double scale);

  /// After unpack(): decides for members that this rank did not use. With `used_by_any` they get the
  /// reduced gradient, otherwise they are left as they were before pack() (None stays None).
  void settle(const std::vector<uint8_t>& used_by_any);

  /// True if a member was not used by this rank in the last pack().
  bool has_unused() const { return has_unused_; }

  /// After the reduction: adds to `used_by_any` (by parameter index) what the usage numbers say.
  /// Blocks the host until they are readable.
  void reported_usage(std::vector<uint8_t>& used_by_any) const;

  /// After the reduction of a stamped bucket whose message is the sum over `summed` ranks (1: it is
  /// their average): false if another rank surely packed another stamp. Blocks the host.
  bool stamps_agree(int summed) const;

  /// After the reduction of a bucket that signals: whether any rank has. Blocks the host.
  bool signalled() const;

  /// Largest absolute value of each packed gradient, in the order of slots() (0 where there is none):
  /// not finite where a gradient is not. On the bucket's device; one multi-tensor call.
  at::Tensor largest_values() const;

  /// Forgets a message that is in flight, so that what still writes to it cannot be seen any more.
  /// Gradients that were moved into a bucket that was not packed yet are put back.
  void abandon();

  /// How many gradients the last pack() copied.
  int64_t copied() const { return copied_; }

  /// And of these, how many copy_early() had copied.
  int64_t copied_early() const { return copied_early_; }

 private:
  void allocate();
  void pack_flat(const std::vector<uint8_t>& used, double scale, const BucketNumbers& numbers);
  bool is_copied(const Slot& slot, double scale) const;
  int64_t signal_place() const { return data_numel_ + static_cast<int64_t>(reported_.size()); }
  void pack_in_place(double scale);
  void pack_sparse(double scale);

  Kind kind_;
  at::Device device_;
  BucketOptions options_;
  std::vector<Slot> slots_;
  std::vector<int64_t> reported_;
  at::ScalarType wire_dtype_ = at::kFloat;  ///< real-valued
  int64_t data_numel_ = 0;                  ///< in elements of wire_dtype_
  at::Tensor buffer_;                       ///< flat: gradients, usage, signal, stamp; in wire_dtype_
  at::Tensor home_;     ///< where views live if their dtype is not the wire's, else buffer_
  at::Tensor message_;  ///< what is reduced in this backward
  bool in_place_ = false;  ///< kInPlace: message_ is an alias of the gradient
  bool packed_ = false;    ///< between pack() and unpack()
  bool has_unused_ = false;
  int stamp_ = 0;
  double number_scale_ = 1.0;  ///< what the numbers behind the gradients were multiplied by
  int64_t copied_ = 0;
  int64_t copied_early_ = 0;
};

}  // namespace apex::parallel
