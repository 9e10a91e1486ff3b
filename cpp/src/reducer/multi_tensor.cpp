// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/multi_tensor.h"

#include <cstring>
#include <limits>

#include <ATen/Functions.h>

namespace apex::parallel {

namespace {

/// Whether the tensor is lazily conjugated or negated, so that its memory is not its value.
bool is_lazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

}  // namespace

bool copy_in_one_pass(const at::Tensor& target, const at::Tensor& source) {
  const bool plain = target.is_cpu() && source.is_cpu() && !is_lazy(target) && !is_lazy(source) &&
                     target.scalar_type() == source.scalar_type() &&
                     target.sizes() == source.sizes() && target.strides() == source.strides() &&
                     target.is_non_overlapping_and_dense();
  if (plain) std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), target.nbytes());
  return plain;
}

void multi_tensor_copy(std::vector<at::Tensor> targets, std::vector<at::Tensor> sources) {
  size_t kept = 0;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].numel() == 0) continue;
    if (is_lazy(targets[i]) || is_lazy(sources[i])) {
      targets[i].copy_(sources[i]);
      continue;
    }
    if (copy_in_one_pass(targets[i], sources[i])) continue;
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
}

at::Tensor max_norms_of(std::vector<at::Tensor> values) {
  for (at::Tensor& one : values) {
    if (one.is_complex()) one = at::view_as_real(one.resolve_conj());
  }
  std::vector<at::Tensor> norms =
      at::_foreach_norm(values, std::numeric_limits<double>::infinity(), at::kDouble);
  for (at::Tensor& norm : norms) norm = norm.to(norms.front().device());
  return at::stack(norms);
}

}  // namespace apex::parallel
