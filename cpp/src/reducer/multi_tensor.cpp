// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/multi_tensor.h"

#include <cstring>
#include <limits>

#include <ATen/Functions.h>

#include "comm/scale_in_place.h"

namespace apex::parallel {

bool same_dense_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

namespace {

template <typename T>
void scaled_copy(const at::Tensor& target, const at::Tensor& source, double scale) {
  T* const out = static_cast<T*>(target.mutable_data_ptr());
  const T* const in = static_cast<const T*>(source.const_data_ptr());
  const T factor = static_cast<T>(scale);
  const int64_t count = target.numel();
  for (int64_t i = 0; i < count; ++i) out[i] = in[i] * factor;
}

/// Whether the tensor is lazily conjugated or negated, so that its memory is not its value.
bool is_lazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

}  // namespace

bool copy_in_one_pass(const at::Tensor& target, const at::Tensor& source, double scale) {
  if (is_lazy(target) || is_lazy(source)) return false;
  if (!target.is_cpu() || !source.is_cpu() || target.scalar_type() != source.scalar_type() ||
      !same_dense_layout(target, source)) {
    return false;
  }
  if (scale == 1.0) {
    std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), target.nbytes());
  } else if (target.scalar_type() == at::kFloat) {
    scaled_copy<float>(target, source, scale);
  } else if (target.scalar_type() == at::kDouble) {
    scaled_copy<double>(target, source, scale);
  } else {
    return false;
  }
  return true;
}

void multi_tensor_copy(std::vector<at::Tensor> targets, std::vector<at::Tensor> sources,
                       double scale) {
  size_t kept = 0;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].numel() == 0) continue;
    if (is_lazy(targets[i]) || is_lazy(sources[i])) {
      targets[i].copy_(scale == 1.0 ? sources[i] : at::mul(sources[i], scale));
      continue;
    }
    if (copy_in_one_pass(targets[i], sources[i], scale)) continue;
    if (kept != i) {
      targets[kept] = std::move(targets[i]);
      sources[kept] = std::move(sources[i]);
    }
    ++kept;
  }
  if (kept == 0) return;
  targets.resize(kept);
  sources.resize(kept);
  at::_foreach_copy_(targets, sources);
  if (scale == 1.0) return;
  if (!targets.front().is_cpu()) return at::_foreach_mul_(targets, scale);
  for (const at::Tensor& target : targets) scale_in_place(target, scale);
}

at::Tensor flat_alias(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
  return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat;
}

std::vector<at::Tensor> max_norms_of(std::vector<at::Tensor> values) {
  for (at::Tensor& one : values) {
    if (one.is_complex()) one = at::view_as_real(one.resolve_conj());
  }
  return at::_foreach_norm(values, std::numeric_limits<double>::infinity(), at::kDouble);
}

}  // namespace apex::parallel
