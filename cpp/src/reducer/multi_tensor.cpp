// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/multi_tensor.h"

#include <algorithm>
#include <cstring>

#include <ATen/Dispatch.h>
#include <ATen/Functions.h>

#include "comm/received_values.h"
#include "square_sums.h"

namespace apex::parallel {

bool same_dense_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

namespace {

template <typename T>
void multiply(T* out, const T* in, T factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = in[i] * factor;
}

template <typename T>
void scaled_copy(const at::Tensor& target, const at::Tensor& source, double scale,
                 double* squares) {
  T* const out = static_cast<T*>(target.mutable_data_ptr());
  const T* const in = static_cast<const T*>(source.const_data_ptr());
  const T factor = static_cast<T>(scale);
  if (squares == nullptr) return multiply(out, in, factor, target.numel());
  *squares = copy_scaled_squares(out, in, factor, target.numel());
}

/// Calls `body(T{}, numbers)` with the real type of a dense tensor and its number of real numbers
/// (two per complex element).
template <typename Body>
void dispatch_real(const at::Tensor& tensor, Body&& body) {
  const int64_t numbers = tensor.numel() * (tensor.is_complex() ? 2 : 1);
  const at::ScalarType dtype = c10::toRealValueType(tensor.scalar_type());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "squares",
                                  [&] { body(scalar_t{}, numbers); });
}

/// Copies a tensor without gaps.
void plain_copy(const at::Tensor& target, const at::Tensor& source, double* squares) {
  if (squares == nullptr) {
    std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), target.nbytes());
    return;
  }
  dispatch_real(source, [&](auto zero, int64_t count) {
    using T = decltype(zero);
    auto* const out = static_cast<T*>(target.mutable_data_ptr());
    const auto* const in = static_cast<const T*>(source.const_data_ptr());
    *squares = copy_squares(out, in, count);
  });
}

/// Whether the tensor is lazily conjugated or negated, so that its memory is not its value.
bool is_lazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

}  // namespace

bool copy_in_one_pass(const at::Tensor& target, const at::Tensor& source, double scale,
                      double* squares) {
  if (is_lazy(target) || is_lazy(source)) return false;
  if (!target.is_cpu() || !source.is_cpu() || target.scalar_type() != source.scalar_type() ||
      !same_dense_layout(target, source)) {
    return false;
  }
  if (scale == 1.0) {
    plain_copy(target, source, squares);
  } else if (target.scalar_type() == at::kFloat) {
    scaled_copy<float>(target, source, scale, squares);
  } else if (target.scalar_type() == at::kDouble) {
    scaled_copy<double>(target, source, scale, squares);
  } else {
    return false;
  }
  return true;
}

double sum_of_squares(const at::Tensor& tensor) {
  const bool dense = tensor.is_non_overlapping_and_dense();
  const at::Tensor values = dense ? tensor : tensor.contiguous();
  double squares = 0;
  dispatch_real(values, [&](auto zero, int64_t count) {
    const auto* const in = static_cast<const decltype(zero)*>(values.const_data_ptr());
    squares = squares_of(in, count);
  });
  return squares;
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

std::vector<at::Tensor> norms_of(std::vector<at::Tensor> values, double order) {
  for (at::Tensor& one : values) {
    if (one.is_complex()) one = at::view_as_real(one.resolve_conj());
  }
  return at::_foreach_norm(values, order, at::kDouble);
}

}  // namespace apex::parallel
