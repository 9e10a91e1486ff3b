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
  int facts = 0;  ///< so many numbers behind the used-parameter mask, at most 32: facts about a rank's step
  /// Where the memory of the buffer comes from, zeroed: (elements, options). Empty: from torch.
  std::function<at::Tensor(int64_t, const at::TensorOptions&)> allocate;
};

/// A group of gradients that are reduced by one collective.
///
/// Besides gradients a flat bucket carries one number per *reported* parameter: 1 where this rank has
/// a gradient for it and 0 where it has not, so that after the sum every rank can tell whether any
/// rank had one, without a collective of its own. See Note [Usage travels with the gradients] in
/// reducer_plan.cpp. Behind these there may be facts: numbers that are 1 where the fact holds on this rank
/// and 0 elsewhere. The sum of such a number is above 0 exactly if the fact holds on some rank, in every
/// dtype and for every world size. Neither is scaled with the gradients.
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
    /// The buffer seen with the parameter's shape, strides and dtype. Never handed out: whoever holds a
    /// gradient may point it elsewhere (`grad.data = ...`), and with it every tensor that is the same one.
    at::Tensor view;
    at::Tensor handed;    ///< the last tensor like it that was handed out
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
  bool carries_facts() const { return options_.facts > 0; }

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
  /// @param used  by parameter index of the reducer: whether this rank contributes; a used member
  ///              has a gradient. A member that is not used contributes its present gradient if it
  ///              has one, else zeros.
  /// @param facts  bit i: number i of the facts, of a bucket that carries facts.
  /// One multi-tensor copy at most; gradients that already are views of the buffer are not copied, and
  /// neither is that of a bucket in place, if nothing but its parameter and `incoming` refers to its
  /// memory (see Note [Who may read a gradient's memory] in bucket.cpp).
  /// @param incoming  the gradient that autograd is accumulating just now, if it is.
  void pack(const std::vector<uint8_t>& used, double scale, uint32_t facts = 0,
            const at::Tensor& incoming = {});

  /// The message of a rank that contributes nothing to this bucket, which other ranks have packed: zeros (with
  /// `poison`: NaN, for devices on which nobody reads the facts), no parameter used, and these facts. A new
  /// tensor; the bucket is not changed. Undefined for a sparse bucket.
  at::Tensor absent_message(uint32_t facts, bool poison) const;

  /// The tensor to reduce, valid between pack() and unpack(): contiguous, real-valued, or sparse.
  const at::Tensor& message() const { return message_; }

  /// The buffer that gradients are views of with gradient_as_bucket_view, [data_numel]; of a bucket in
  /// place, the gradient as a flat alias. Undefined before the first pack().
  at::Tensor gradients_buffer() const;

  /// The gradients' part of the buffer [data_numel] and its views, for communication hooks. Between
  /// pack() and unpack() of a flat or in-place bucket.
  at::Tensor data() const;
  std::vector<at::Tensor> data_views() const;

  /// Views of `data` [data_numel], laid out as data() is.
  std::vector<at::Tensor> views_of(const at::Tensor& data) const;

  /// Replaces the gradients' part of the message by `result`: same number of elements, any dtype.
  void assign(const at::Tensor& result);

  /// Of a sparse bucket: replaces the message by the reduced tensor.
  void assign_sparse(at::Tensor result);

  /// Multiplies the gradients' part of the message by `scale` and hands every used member its gradient: as a
  /// view of the buffer, or by one multi-tensor copy. Members that this rank did not use are left for
  /// settle().
  /// @param kept  by parameter index of the reducer: whether .grad was there before this backward.
  void unpack(double scale, const std::vector<uint8_t>& kept);

  /// After unpack(): decides for members that this rank did not use. With `used_by_any` they get the
  /// reduced gradient, otherwise they are left as they were before pack() (None stays None).
  void settle(const std::vector<uint8_t>& used_by_any);

  /// True if a member was not used by this rank in the last pack().
  bool has_unused() const { return has_unused_; }

  /// After the reduction: adds to `used_by_any` (by parameter index) what the usage numbers say.
  /// Blocks the host until they are readable.
  void reported_usage(std::vector<uint8_t>& used_by_any) const;

  /// After the reduction of a bucket that carries facts: bit i is set if fact i holds on some rank. `message`:
  /// what absent_message() gave, if that was reduced instead. Blocks the host until they are readable.
  uint32_t facts_of_any(const at::Tensor& message = {}) const;

  /// Largest absolute value of each packed gradient, in the order of slots() (0 where there is none):
  /// not finite where a gradient is not. On the bucket's device; one multi-tensor call.
  at::Tensor largest_values() const;

  /// Forgets a message that is in flight, so that what still writes to it cannot be seen any more: a
  /// gradient that lies in it is taken away from its parameter. Gradients that were moved into a bucket, or
  /// are views of it, and were not packed yet are put back as tensors of their own.
  void abandon();

  /// How many gradients the last pack() copied.
  int64_t copied() const { return copied_; }

  /// And of these, how many copy_early() had copied.
  int64_t copied_early() const { return copied_early_; }

 private:
  void allocate();
  void pack_flat(const std::vector<uint8_t>& used, double scale, uint32_t facts);
  bool is_copied(const Slot& slot, double scale) const;
  at::Tensor view_as_gradient(Slot& slot) const;
  int64_t facts_place() const { return data_numel_ + static_cast<int64_t>(reported_.size()); }
  void write_trailer(const at::Tensor& message, const std::vector<uint8_t>& used, uint32_t facts) const;
  std::vector<uint8_t> positive(const at::Tensor& message, int64_t begin, int64_t count) const;
  void pack_in_place(double scale, const at::Tensor& incoming);
  void pack_sparse(double scale);

  Kind kind_;
  at::Device device_;
  BucketOptions options_;
  std::vector<Slot> slots_;
  std::vector<int64_t> reported_;
  at::ScalarType wire_dtype_ = at::kFloat;  ///< real-valued
  int64_t data_numel_ = 0;                  ///< in elements of wire_dtype_
  at::Tensor buffer_;                       ///< flat: gradients, used-parameter mask, facts; in wire_dtype_
  at::Tensor home_;     ///< where views live if their dtype is not the wire's, else buffer_
  at::Tensor message_;  ///< what is reduced in this backward
  bool in_place_ = false;  ///< kInPlace: message_ is an alias of the gradient
  bool packed_ = false;    ///< between pack() and unpack()
  bool has_unused_ = false;
  int64_t copied_ = 0;
  int64_t copied_early_ = 0;
};

}  // namespace apex::parallel
