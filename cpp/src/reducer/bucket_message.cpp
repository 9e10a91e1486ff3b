// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/bucket_message.h"

#include <limits>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <apex/error.h>

#include "comm/scale_in_place.h"
#include "reducer/multi_tensor.h"
#include "tensor_memory.h"

namespace apex::parallel::detail {

// Note [Gradients in their bucket]
//
// On the CPU a gradient is copied into its bucket as soon as it is complete, elsewhere when the
// bucket is launched. From then on .grad is an alias of its place in the bucket, so a further
// gradient of the same backward, or a hook that changes .grad, changes the message.
//
// With gradient_as_bucket_view the alias stays. The gradient's own memory is free at once, and the
// next gradients of the backward reuse it while it is in the cache. Without it, the average is
// copied back:
// - into a gradient that existed before the backward, because autograd itself has added to that
//   memory, and it may be part of a buffer of the caller;
// - into a gradient that this backward made, unless its memory has another owner. Autograd may keep
//   an incoming gradient without a copy although its memory has other owners: for
//   `a.view(-1) + b.view(-1)`, .grad of a and b are views of one gradient, and a hook may have kept
//   a view;
// - otherwise into a new tensor. A gradient with a grad_fn (create_graph=True) stays unchanged for
//   its holders.
//
// A program may still hold an alias from an earlier backward, or may have moved it to another
// parameter. Before the first gradient of a backward is copied, the owners of the memory are
// counted. If there are others than the message and its members' gradients, the message and these
// gradients get a new buffer.

namespace {

/// Gradients and buffers are handled below autograd: no versions, no view tracking, no graph.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

/// Gradients whose size is a multiple of this come first in the buffer.
constexpr int64_t kAlignmentBytes = 16;

/// A view of a slot's part of `buffer`, with the shape of its parameter, and with its strides if
/// they leave no gaps.
at::Tensor view_of(const at::Tensor& buffer, const BucketMessage::Slot& slot,
                   at::ScalarType dtype) {
  const at::Tensor& like = slot.like;
  at::Tensor flat = buffer.narrow(0, slot.offset, slot.numel * (at::isComplexType(dtype) ? 2 : 1));
  if (at::isComplexType(dtype)) flat = at::view_as_complex(flat.view({-1, 2}));
  if (like.is_non_overlapping_and_dense()) {
    return flat.as_strided(like.sizes(), like.strides(), flat.storage_offset());
  }
  return flat.view(like.sizes());
}

/// True if the gradient has the same memory and layout as the slot's view of the buffer.
bool lies_in(const at::Tensor& grad, const BucketMessage::Slot& slot) {
  return slot.numel > 0 && grad.defined() && has_memory(grad) && !grad.is_conj() &&
         !grad.is_neg() && grad.const_data_ptr() == slot.view.const_data_ptr() &&
         grad.sizes() == slot.view.sizes() && grad.strides() == slot.view.strides() &&
         grad.scalar_type() == slot.view.scalar_type();
}

/// A separate tensor on the same memory, to be handed out as a gradient.
at::Tensor handed_out(const at::Tensor& view) { return view.variable_data(); }

/// Whether an average may be written into the gradient that the alias has replaced.
bool takes_average(const BucketMessage::Slot& slot) {
  const at::Tensor& own = slot.own;
  return own.defined() && !own.requires_grad() && has_memory(own) &&
         (slot.kept || own.storage().use_count() == 1);
}

}  // namespace

at::ScalarType message_dtype(at::ScalarType dtype, bool always_fp32) {
  if (at::isComplexType(dtype)) return c10::toRealValueType(dtype);
  if (always_fp32 && (dtype == at::kHalf || dtype == at::kBFloat16)) return at::kFloat;
  return dtype;
}

BucketMessage::BucketMessage(const std::vector<int64_t>& parameters,
                             const std::vector<at::Tensor>& variables, at::Device device,
                             MessageOptions options)
    : device_(device),
      options_(std::move(options)),
      dtype_(message_dtype(variables.front().scalar_type(), options_.allreduce_always_fp32)) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    Slot slot;
    slot.parameter = parameters[i];
    slot.variable = variables[i];
    slot.like = at::empty_strided(variables[i].sizes(), variables[i].strides(),
                                  variables[i].options().device(at::kMeta));
    slot.numel = variables[i].numel();
    slots_.push_back(std::move(slot));
  }
  // There is no padding, so the order keeps most gradients aligned for vector loads and stores.
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype_));
  for (const bool aligned : {true, false}) {
    for (Slot& slot : slots_) {
      const int64_t numel = slot.numel * (slot.variable.is_complex() ? 2 : 1);
      if ((numel * element_bytes % kAlignmentBytes == 0) != aligned) continue;
      slot.offset = numel_;
      numel_ += numel;
    }
  }
}

void BucketMessage::allocate() {
  const auto options = at::TensorOptions().dtype(dtype_).device(device_);
  const int64_t numel = numel_ + options_.tail;
  buffer_ = options_.allocate ? options_.allocate(numel, options) : at::zeros({numel}, options);
  home_ = buffer_;
  const at::ScalarType dtype = slots_.front().like.scalar_type();
  const at::ScalarType real = c10::toRealValueType(dtype);
  if (real != dtype_) home_ = at::zeros({numel_}, options.dtype(real));
  for (Slot& slot : slots_) slot.view = view_of(home_, slot, dtype);
}

/// Whether the buffer has other owners than this message and its members' gradients.
bool BucketMessage::is_held() const {
  size_t ours = 1 + slots_.size();
  for (const Slot& slot : slots_) ours += lies_in(slot.variable.grad(), slot) ? 1 : 0;
  return home_.storage().use_count() > ours || (has_home() && buffer_.storage().use_count() > 1);
}

/// Prepares the buffer for the gradients of a backward: see Note [Gradients in their bucket].
void BucketMessage::open() {
  if (std::exchange(open_, true)) return;
  copied_ = 0;
  if (buffer_.defined() && !is_held()) return;
  std::vector<Slot*> inside;
  for (Slot& slot : slots_) {
    if (slot.view.defined() && lies_in(slot.variable.grad(), slot)) inside.push_back(&slot);
  }
  allocate();
  for (Slot* slot : inside) {  // its gradients move along
    slot->view.copy_(slot->variable.grad());
    slot->variable.mutable_grad() = handed_out(slot->view);
  }
}

/// The values of a gradient in memory. It has a grad_fn after a backward with create_graph=True.
at::Tensor BucketMessage::source_of(const at::Tensor& grad) const {
  const at::Tensor values = in_memory(grad.requires_grad() ? grad.detach() : grad);
  // A copy within the same memory, to another layout, would overwrite its source.
  return values.storage().is_alias_of(home_.storage()) ? values.clone() : values;
}

/// Replaces the gradient of a slot, which was copied, by an alias of its place.
void BucketMessage::alias(Slot& slot, bool kept) {
  at::Tensor& grad = slot.variable.mutable_grad();
  // On a device, other streams may still use its memory: it is kept until unpack().
  const bool keeps = !options_.gradient_as_bucket_view || !device_.is_cpu();
  if (keeps && !slot.own.defined()) {
    slot.own = std::move(grad);
    slot.kept = kept;
  }
  grad = handed_out(slot.view);
  ++copied_;
}

void BucketMessage::put(size_t index, bool kept) {
  const BelowAutograd guard;
  open();
  Slot& slot = slots_[index];
  const at::Tensor& grad = slot.variable.grad();
  if (!grad.defined() || lies_in(grad, slot)) return;
  const at::Tensor source = source_of(grad);
  if (!copy_in_one_pass(slot.view, source)) slot.view.copy_(source);
  alias(slot, kept);
}

void BucketMessage::pack(const std::vector<uint8_t>& used, const std::vector<uint8_t>& kept,
                         double scale) {
  const BelowAutograd guard;
  open();
  packed_ = true;
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> zeros;
  for (Slot& slot : slots_) {
    slot.used = used[slot.parameter] != 0;
    slot.stash = at::Tensor();
    const at::Tensor& grad = slot.variable.grad();
    if (!grad.defined()) {
      zeros.push_back(slot.view);
    } else if (lies_in(grad, slot)) {
      // An unused gradient may have to be restored later.
      if (!slot.used) slot.stash = slot.view.clone();
    } else {
      targets.push_back(slot.view);
      sources.push_back(source_of(grad));
      if (slot.used) alias(slot, kept[slot.parameter] != 0);
    }
  }
  multi_tensor_copy(std::move(targets), std::move(sources));
  if (!zeros.empty()) at::_foreach_zero_(zeros);
  if (has_home()) gradients_of(buffer_).copy_(home_);
  if (scale != 1.0) scale_in_place(gradients_of(buffer_), scale);
}

void BucketMessage::blank(bool poison) {
  const BelowAutograd guard;
  give_back();
  const size_t ours = 1 + slots_.size();
  if (!buffer_.defined() || home_.storage().use_count() > ours) allocate();
  buffer_.fill_(poison ? std::numeric_limits<double>::quiet_NaN() : 0.0);
}

at::Tensor BucketMessage::gradients_buffer() const {
  return home_.defined() ? gradients_of(home_) : home_;
}

std::vector<at::Tensor> BucketMessage::views_of(const at::Tensor& gradients) const {
  const BelowAutograd guard;
  std::vector<at::Tensor> views;
  for (const Slot& slot : slots_) {
    const at::ScalarType dtype = slot.like.scalar_type();
    const bool same = c10::toRealValueType(dtype) == dtype_;
    views.push_back(view_of(gradients, slot, same ? dtype : dtype_));
  }
  return views;
}

void BucketMessage::assign(const at::Tensor& result) {
  const BelowAutograd guard;
  const at::Tensor target = gradients_of(buffer_);
  if (!result.defined() || result.numel() != target.numel()) {
    throw InvalidArgument("a communication hook returned " +
                          std::to_string(result.defined() ? result.numel() : 0) +
                          " elements for a bucket of " + std::to_string(target.numel()) +
                          "; its future must yield a tensor like bucket.buffer()");
  }
  if (result.is_complex() && !target.is_complex()) {
    throw InvalidArgument("a communication hook returned " +
                          std::string(c10::toString(result.scalar_type())) + " for a bucket of " +
                          c10::toString(target.scalar_type()));
  }
  if (result.const_data_ptr() != target.const_data_ptr()) target.copy_(result.reshape({-1}));
}

/// .grad becomes the average in the slot's view, which is added to the copies to be made if it is
/// not an alias.
void BucketMessage::hand_out(Slot& slot, std::vector<at::Tensor>& targets,
                             std::vector<at::Tensor>& sources) {
  at::Tensor& grad = slot.variable.mutable_grad();
  if (options_.gradient_as_bucket_view) {
    if (!lies_in(grad, slot)) grad = handed_out(slot.view);
    return;
  }
  grad = takes_average(slot) ? slot.own : at::empty_like(slot.view);
  targets.push_back(grad);
  sources.push_back(slot.view);
}

void BucketMessage::unpack(double scale, const std::vector<uint8_t>& used_by_any) {
  const BelowAutograd guard;
  packed_ = open_ = false;
  if (scale == 0) {
    gradients_of(buffer_).zero_();
  } else if (scale != 1.0) {
    scale_in_place(gradients_of(buffer_), scale);
  }
  if (has_home()) home_.copy_(gradients_of(buffer_));
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> sources;
  for (Slot& slot : slots_) {
    const at::Tensor& grad = slot.variable.grad();
    if (!slot.used && used_by_any[slot.parameter] != 0) {
      slot.own = grad;
      slot.kept = true;
      hand_out(slot, targets, sources);
    } else if (slot.used && grad.defined()) {  // else the user has cleared it
      hand_out(slot, targets, sources);
    } else if (slot.stash.defined()) {
      slot.view.copy_(slot.stash);
    }
    slot.own = slot.stash = at::Tensor();
  }
  multi_tensor_copy(std::move(targets), std::move(sources));
}

/// Gradients are this rank's own again. After pack(), the buffer may hold a part of the sum.
void BucketMessage::give_back() {
  for (Slot& slot : slots_) {
    at::Tensor& grad = slot.variable.mutable_grad();
    if (slot.view.defined() && lies_in(grad, slot)) {
      if (packed_) {
        grad = slot.own;
      } else if (takes_average(slot)) {
        slot.own.copy_(slot.view);
        grad = slot.own;
      }
    }
    slot.own = slot.stash = at::Tensor();
  }
  packed_ = open_ = false;
}

void BucketMessage::abandon() {
  const BelowAutograd guard;
  give_back();
  for (Slot& slot : slots_) slot.view = at::Tensor();
  // Collectives in flight keep a reference to the old buffer, which has no other user.
  buffer_ = home_ = at::Tensor();
}

}  // namespace apex::parallel::detail
