// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/bucket_message.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <apex/error.h>

#include "comm/scale_in_place.h"
#include "reducer/bucket_layout.h"
#include "reducer/freed_memory.h"
#include "reducer/multi_tensor.h"
#include "tensor_memory.h"

namespace apex::parallel::detail {

namespace {

/// Gradients and buffers are handled below autograd: no versions, no view tracking, no graph.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

/// A view of a slot's part of `buffer`, with the shape of its parameter, and with its strides if
/// they leave no gaps.
at::Tensor view_of(const at::Tensor& buffer, const BucketMessage::Slot& slot,
                   at::ScalarType dtype) {
  const at::Tensor& like = slot.variable;
  at::Tensor flat = buffer.narrow(0, slot.offset, slot.numel * (at::isComplexType(dtype) ? 2 : 1));
  if (at::isComplexType(dtype)) flat = at::view_as_complex(flat.view({-1, 2}));
  if (like.is_non_overlapping_and_dense()) {
    return flat.as_strided(like.sizes(), like.strides(), flat.storage_offset());
  }
  return flat.view(like.sizes());
}

/// The gradient as a strided tensor in memory, without a grad_fn (which it has after a backward
/// with create_graph=True).
at::Tensor dense(const at::Tensor& grad) {
  return in_memory(grad.requires_grad() ? grad.detach() : grad);
}

/// True if the gradient has the same memory and layout as the slot's view of the buffer.
bool lies_in(const at::Tensor& grad, const BucketMessage::Slot& slot) {
  return slot.numel > 0 && has_memory(grad) && !grad.is_conj() && !grad.is_neg() &&
         grad.const_data_ptr() == slot.view.const_data_ptr() && grad.sizes() == slot.view.sizes() &&
         grad.strides() == slot.view.strides() && grad.scalar_type() == slot.view.scalar_type();
}

/// A separate tensor on the same memory, to be handed out as a gradient.
at::Tensor handed_out(const at::Tensor& view) { return view.variable_data(); }

// Note [Who may read a gradient's memory]
//
// Autograd may keep an incoming gradient without copying it if there is no other reference to that
// *tensor*, although its *memory* has other owners. For `a.view(-1) + b.view(-1)`, .grad of a and b
// are views of one gradient. For `x + position.unsqueeze(0)`, .grad is a view of the gradient that
// flows on to x. And the argument of backward() becomes .grad of an output that is a parameter. So
// while backward runs, a gradient is scaled and reduced in place only if its storage has no other
// owner. The count excludes references that are about to end: during the accumulation of a
// gradient, the engine still holds the incoming gradient and, if that is a view, its base.
//
// When backward has ended, the sum is written into a gradient that existed before the backward,
// because autograd itself has added to that memory, and it may be part of a buffer of the caller. A
// gradient that this backward made is replaced if its memory has another owner.

bool has_one_owner(const at::Tensor& grad, const at::Tensor& incoming) {
  if (grad.requires_grad() || grad.grad_fn()) return false;  // its graph may have saved it
  if (!has_memory(grad)) return false;                       // owners are unknown
  size_t owners = 1;
  if (incoming.defined() && !incoming.is_same(grad) && incoming.use_count() == 1 &&
      has_memory(incoming) && incoming.storage().is_alias_of(grad.storage())) {
    ++owners;
    if (incoming.is_view() && incoming._base().use_count() == 1) ++owners;
  }
  return grad.storage().use_count() <= owners;
}

}  // namespace

at::ScalarType message_dtype(at::ScalarType dtype, bool always_fp32) {
  if (at::isComplexType(dtype)) return c10::toRealValueType(dtype);
  if (always_fp32 && (dtype == at::kHalf || dtype == at::kBFloat16)) return at::kFloat;
  return dtype;
}

BucketMessage::BucketMessage(Kind kind, const std::vector<int64_t>& parameters,
                             const std::vector<at::Tensor>& variables, at::Device device,
                             const MessageOptions& options)
    : kind_(kind), device_(device), options_(options) {
  dtype_ = message_dtype(variables.front().scalar_type(), options_.allreduce_always_fp32);
  std::vector<int64_t> numel;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Slot slot;
    slot.parameter = parameters[i];
    slot.variable = variables[i];
    slot.numel = variables[i].numel();
    numel.push_back(slot.numel * (variables[i].is_complex() ? 2 : 1));
    slots_.push_back(std::move(slot));
  }
  const BucketLayout layout = lay_out(numel, static_cast<int64_t>(c10::elementSize(dtype_)));
  numel_ = layout.numel;
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].offset = layout.offsets[i];
}

void BucketMessage::allocate() {
  if (buffer_.defined()) return;
  const BelowAutograd guard;
  const auto wire = at::TensorOptions().dtype(dtype_).device(device_);
  const int64_t numel = numel_ + options_.tail;
  buffer_ = options_.allocate ? options_.allocate(numel, wire) : at::zeros({numel}, wire);
  home_ = buffer_;
  if (kind_ != Kind::kFlat) return;
  const at::ScalarType dtype = slots_.front().variable.scalar_type();
  if (options_.gradient_as_bucket_view && c10::toRealValueType(dtype) != dtype_) {
    home_ = at::zeros({numel_}, wire.dtype(dtype));
  }
  for (Slot& slot : slots_) {
    const bool same = c10::toRealValueType(dtype) == home_.scalar_type();
    slot.view = view_of(home_, slot, same ? dtype : home_.scalar_type());
  }
}

// Note [Gradients that move into their bucket]
//
// With gradient_as_bucket_view a gradient is no longer needed once it was copied. It is freed
// immediately, not when the bucket is full. The next gradients of the same backward then reuse its
// memory while it is in the cache. Otherwise memory of the size of a bucket would be mapped and
// page faulted again in every step. Until unpack() sets .grad to the view, .grad is undefined. It
// is not the view, because a further gradient of this backward must not be added to values that are
// already scaled. That gradient arrives alone instead, and is scaled before it is added.

void BucketMessage::copy_early(size_t index, double scale) {
  if (kind_ != Kind::kFlat || !device_.is_cpu()) return;
  const BelowAutograd guard;
  allocate();
  Slot& slot = slots_[index];
  at::Tensor& grad = slot.variable.mutable_grad();
  if (!grad.defined() || has_home() || lies_in(grad, slot)) return;
  // This is the memory of another slot, whose own copy may overwrite it. pack() handles this.
  if (has_memory(grad) && grad.storage().is_alias_of(home_.storage())) return;
  if (slot.moved) {
    slot.view.add_(dense(grad), slot.early_scale);
    grad = at::Tensor();
    return;
  }
  slot.early = at::Tensor();
  if (!has_memory(grad) || grad.requires_grad()) return;
  if (!copy_in_one_pass(slot.view, grad, scale)) return;
  slot.early_scale = scale;
  if (options_.gradient_as_bucket_view) {
    slot.moved = true;
    grad = at::Tensor();
  } else {
    slot.early = grad;
    slot.early_version = grad._version();
  }
}

// An example is a swap of the gradients of two parameters, if the gradients are views. A source may
// be overwritten before it is copied, by another copy or, in memory shared by the ranks, by their
// sum. This runs here because later the order in which buckets are packed is unknown.

void BucketMessage::move_misplaced(const std::vector<const BucketMessage*>& all) {
  const BelowAutograd guard;
  for (Slot& slot : slots_) {
    at::Tensor& grad = slot.variable.mutable_grad();
    if (!grad.defined() || !has_memory(grad) || grad.requires_grad()) continue;
    if (slot.view.defined() && lies_in(grad, slot)) continue;
    const bool misplaced = std::any_of(all.begin(), all.end(), [&](const BucketMessage* message) {
      return message->home_.defined() && grad.storage().is_alias_of(message->home_.storage());
    });
    if (misplaced) grad = grad.clone();
  }
}

/// Whether the buffer already holds the gradient of this slot, times `scale`.
bool BucketMessage::is_copied(const Slot& slot, double scale) const {
  const at::Tensor& grad = slot.variable.grad();
  if (slot.moved) return !grad.defined();
  return slot.early.defined() && slot.early.is_same(grad) &&
         slot.early._version() == slot.early_version && slot.early_scale == scale;
}

void BucketMessage::pack(const std::vector<uint8_t>& used, double scale,
                         const at::Tensor& incoming) {
  const BelowAutograd guard;
  copied_ = copied_early_ = 0;
  packed_ = true;
  has_unused_ = false;
  owed_scale_ = 1.0;
  for (Slot& slot : slots_) {
    slot.used = used[slot.parameter] != 0;
    has_unused_ |= !slot.used;
    slot.stash = at::Tensor();
  }
  switch (kind_) {
    case Kind::kFlat:
      pack_flat(scale);
      break;
    case Kind::kInPlace:
      pack_in_place(scale, incoming);
      break;
    case Kind::kSparse:
      pack_sparse(scale);
      break;
  }
}

void BucketMessage::pack_flat(double scale) {
  const bool is_new = !buffer_.defined();
  allocate();
  // If gradients are copied into the buffer, the copy also scales them at no extra cost.
  const double while_copying = device_.is_cpu() && !has_home() ? scale : 1.0;
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> zeros;
  std::vector<Slot*> copied_slots;
  targets.reserve(slots_.size());
  sources.reserve(slots_.size());
  for (Slot& slot : slots_) {
    const at::Tensor& grad = slot.variable.grad();
    const bool copied = is_copied(slot, while_copying);
    slot.early = at::Tensor();
    slot.moved &= copied;  // else the user has set another gradient
    if (copied) {
      ++copied_early_;
    } else if (!grad.defined()) {
      zeros.push_back(slot.view);
    } else if (lies_in(grad, slot)) {
      // Already in the buffer. An unused gradient may have to be restored later.
      if (!slot.used) slot.stash = slot.view.clone();
      if (while_copying != 1.0) scale_in_place(slot.view, while_copying);
    } else {
      const at::Tensor source = dense(grad);
      targets.push_back(slot.view);
      // A copy within the same memory, to another layout, would overwrite its source.
      sources.push_back(source.storage().is_alias_of(home_.storage()) ? source.clone() : source);
      copied_slots.push_back(&slot);
    }
  }
  copied_ = copied_early_ + static_cast<int64_t>(targets.size());
  if (options_.gradient_as_bucket_view && device_.is_cpu())
    move_in(copied_slots, targets, sources, while_copying, is_new);
  multi_tensor_copy(std::move(targets), std::move(sources), while_copying);
  if (!zeros.empty()) at::_foreach_zero_(zeros);
  if (has_home()) gradients_of(buffer_).copy_(home_);
  if (while_copying != scale) scale_in_place(gradients_of(buffer_), scale);
  tensor_ = buffer_;
}

/// See Note [Gradients that move into their bucket]. In a recorded backward all gradients exist
/// before the first bucket does. So the memory of moved gradients is also returned to the system.
/// Otherwise the allocator would keep it in addition to the buckets.
void BucketMessage::move_in(std::vector<Slot*>& slots, std::vector<at::Tensor>& targets,
                            std::vector<at::Tensor>& sources, double scale, bool is_new) {
  size_t kept = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    Slot& slot = *slots[i];
    at::Tensor& grad = slot.variable.mutable_grad();
    const bool moves = slot.used && grad.layout() == at::kStrided && !grad.requires_grad() &&
                       has_memory(grad) && slot.view.scalar_type() == slot.variable.scalar_type() &&
                       copy_in_one_pass(targets[i], sources[i], scale);
    if (moves) {
      slot.moved = true;
      slot.early_scale = scale;
      const size_t bytes = grad.nbytes();
      grad = sources[i] = targets[i] = at::Tensor();
      if (is_new) return_freed_memory(bytes);
    } else {
      std::swap(slots[kept], slots[i]);
      std::swap(targets[kept], targets[i]);
      std::swap(sources[kept++], sources[i]);
    }
  }
  slots.resize(kept);
  targets.resize(kept);
  sources.resize(kept);
}

at::Tensor BucketMessage::absent(bool poison, bool idle) {
  const BelowAutograd guard;
  if (is_sparse()) return {};
  at::Tensor tensor;
  if (idle && buffer_.defined() && !gradients_lie_in_buffer()) {
    for (Slot& slot : slots_) slot.early = at::Tensor();  // they were in the buffer
    tensor = buffer_.zero_();
  } else {
    tensor = at::zeros({numel_ + options_.tail}, at::TensorOptions().dtype(dtype_).device(device_));
  }
  return poison ? tensor.fill_(std::numeric_limits<double>::quiet_NaN()) : tensor;
}

/// Whether a gradient uses the buffer's memory, even if it was moved there or set by the user.
bool BucketMessage::gradients_lie_in_buffer() const {
  return std::any_of(slots_.begin(), slots_.end(), [this](const Slot& slot) {
    const at::Tensor& grad = slot.variable.grad();
    return slot.moved ||
           (grad.defined() && has_memory(grad) && grad.storage().is_alias_of(buffer_.storage()));
  });
}

void BucketMessage::pack_in_place(double scale, const at::Tensor& incoming) {
  Slot& slot = slots_.front();
  const at::Tensor& own = slot.variable.grad();
  tensor_ = slot.view = at::Tensor();  // they may still refer to this gradient's memory
  // An unused gradient must not change until it is known whether another rank used it.
  const bool in_place = slot.used && own.defined() && has_memory(own) && !own.is_conj() &&
                        !own.is_neg() && same_dense_layout(own, slot.variable) &&
                        c10::toRealValueType(own.scalar_type()) == dtype_ &&
                        has_one_owner(own, incoming);
  if (in_place) {
    slot.view = handed_out(own);
  } else {
    const at::Tensor grad = own.defined() ? dense(own) : own;
    slot.view =
        at::empty_strided(slot.variable.sizes(), slot.variable.strides(),
                          slot.variable.options().dtype(
                              slot.variable.is_complex() ? slot.variable.scalar_type() : dtype_));
    if (grad.defined()) {
      slot.view.copy_(grad);
      copied_ = 1;
    } else {
      slot.view.zero_();
    }
  }
  tensor_ = flat_alias(slot.view);
  if (scale != 1.0) scale_in_place(tensor_, scale);
}

void BucketMessage::pack_sparse(double scale) {
  Slot& slot = slots_.front();
  at::Tensor grad = slot.variable.grad();
  if (!grad.defined()) {
    grad = at::_sparse_coo_tensor_with_dims(
        options_.sparse_dim, slot.variable.dim() - options_.sparse_dim, slot.variable.sizes(),
        slot.variable.options().layout(at::kSparse));
  } else if (grad.layout() != at::kSparse || grad.sparse_dim() != options_.sparse_dim) {
    // All ranks exchange entries in the recorded form.
    grad = dense(grad).to_sparse(options_.sparse_dim);
  }
  tensor_ = grad.coalesce();
  // The values may alias those of the gradient, so scale a copy.
  if (scale != 1.0 || tensor_.is_same(grad)) tensor_ = tensor_.mul(scale);
}

at::Tensor BucketMessage::gradients_buffer() {
  const double scale = std::exchange(owed_scale_, 1.0);
  if (scale != 1.0) scale_in_place(gradients_of(buffer_), scale);
  if (kind_ != Kind::kFlat) return tensor_;
  return home_.defined() ? gradients_of(home_) : home_;
}

std::vector<at::Tensor> BucketMessage::views_of(const at::Tensor& gradients) const {
  const BelowAutograd guard;
  std::vector<at::Tensor> views;
  for (const Slot& slot : slots_) {
    const at::ScalarType dtype = slot.variable.scalar_type();
    const bool same = c10::toRealValueType(dtype) == dtype_;
    views.push_back(view_of(gradients, slot, same ? dtype : dtype_));
  }
  return views;
}

void BucketMessage::assign(const at::Tensor& result) {
  if (is_sparse()) {
    tensor_ = result;
    return;
  }
  const BelowAutograd guard;
  const at::Tensor target = gradients_of(tensor_);
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

void BucketMessage::unpack(double scale, const std::vector<uint8_t>& kept) {
  const BelowAutograd guard;
  packed_ = false;
  if (is_sparse()) {
    if (scale != 1.0) scale_in_place(tensor_, scale);
    Slot& slot = slots_.front();
    if (slot.used) slot.variable.mutable_grad() = tensor_;
    return;
  }
  // If all gradients are copied out of the buffer, the copy also scales them at no extra cost.
  const bool scales_copies = scale != 1.0 && device_.is_cpu() && kind_ == Kind::kFlat &&
                             !options_.gradient_as_bucket_view && !has_unused_ &&
                             (dtype_ == at::kFloat || dtype_ == at::kDouble) &&
                             slots_.front().variable.scalar_type() == dtype_;
  const double while_copying = scales_copies ? scale : 1.0;
  if (scale != 1.0 && !scales_copies) scale_in_place(gradients_of(tensor_), scale);
  if (kind_ == Kind::kFlat && has_home()) home_.copy_(gradients_of(buffer_));
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> sources;
  for (Slot& slot : slots_) {
    if (!slot.used) continue;
    at::Tensor& grad = slot.variable.mutable_grad();
    const bool moved = std::exchange(slot.moved, false) && !grad.defined();
    const bool view_fits = slot.view.scalar_type() == slot.variable.scalar_type();
    const bool views = options_.gradient_as_bucket_view && view_fits;
    if (moved) {
      grad = view_as_gradient(slot);
    } else if (!grad.defined() || lies_in(grad, slot)) {
      // If undefined, the user has cleared it.
    } else if (views) {
      grad = view_as_gradient(slot);
    } else {
      if (grad.requires_grad() || !has_memory(grad) ||
          !(kept[slot.parameter] || has_one_owner(grad, {}))) {
        // A gradient with a grad_fn stays unchanged for its holders; the reduced one is new.
        grad = at::empty_like(slot.view, slot.variable.options(), at::MemoryFormat::Preserve);
      }
      targets.push_back(grad);
      sources.push_back(slot.view);
      continue;
    }
    if (scales_copies) scale_in_place(slot.view, scale);
  }
  multi_tensor_copy(std::move(targets), std::move(sources), while_copying);
  if (scales_copies) owed_scale_ = scale;
  if (!has_unused_) let_go();
}

/// Releases references to memory of the gradients, so that it is freed with them and not in the
/// next backward.
void BucketMessage::let_go() {
  // With gradient_as_bucket_view the user may request the buffers.
  if (kind_ != Kind::kInPlace || options_.gradient_as_bucket_view) return;
  tensor_ = at::Tensor();
  for (Slot& slot : slots_) slot.view = at::Tensor();
}

/// An alias of the slot's view that the user may change.
at::Tensor BucketMessage::view_as_gradient(Slot& slot) const {
  // An alias would be another owner of the gradient's memory.
  if (kind_ != Kind::kFlat) return handed_out(slot.view);
  // Reuse the alias of the last backward if it is unchanged.
  if (!slot.handed.defined() || !lies_in(slot.handed, slot) || slot.handed.requires_grad()) {
    slot.handed = handed_out(slot.view);
  }
  return slot.handed;
}

void BucketMessage::settle(const std::vector<uint8_t>& used_by_any) {
  if (!has_unused_) return;
  const BelowAutograd guard;
  for (Slot& slot : slots_) {
    if (slot.used) continue;
    if (!used_by_any[slot.parameter]) {
      if (slot.stash.defined()) slot.view.copy_(slot.stash);
      slot.stash = at::Tensor();
      continue;
    }
    at::Tensor& grad = slot.variable.mutable_grad();
    if (is_sparse()) {
      grad = tensor_;
    } else if (grad.defined() && lies_in(grad, slot)) {
      // A view of the buffer already has the reduced values.
    } else if (kind_ == Kind::kFlat && options_.gradient_as_bucket_view &&
               slot.view.scalar_type() == slot.variable.scalar_type()) {
      grad = view_as_gradient(slot);
    } else if (grad.defined() && !grad.requires_grad() && has_memory(grad)) {
      grad.copy_(slot.view);
    } else if (kind_ == Kind::kInPlace) {
      grad = view_as_gradient(slot);
    } else {
      grad = at::empty_like(slot.view, slot.variable.options(), at::MemoryFormat::Preserve);
      grad.copy_(slot.view);
    }
    slot.stash = at::Tensor();
  }
  let_go();
}

void BucketMessage::abandon() {
  const BelowAutograd guard;
  const bool packed = std::exchange(packed_, false);
  tensor_ = at::Tensor();
  for (Slot& slot : slots_) {
    at::Tensor& grad = slot.variable.mutable_grad();
    // A moved gradient is still this rank's own gradient until it is packed. Nothing else uses its
    // place, and there may be no memory for a copy.
    if (slot.moved && !packed && !grad.defined())
      grad = handed_out(slot.view.div_(slot.early_scale));
    if (packed && slot.view.defined() && grad.defined() && lies_in(grad, slot)) grad = at::Tensor();
    slot.moved = false;
    slot.stash = slot.early = slot.handed = at::Tensor();
  }
  owed_scale_ = 1.0;
  // Collectives in flight keep a reference to the old buffer, which has no other user.
  buffer_ = home_ = at::Tensor();
  for (Slot& slot : slots_) slot.view = at::Tensor();
}

}  // namespace apex::parallel::detail
