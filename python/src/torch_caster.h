// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Type caster of at::Tensor between Python and C++. Both sides share the TensorImpl, and so the
/// leaf, its grad and its grad accumulator. DLPack would make a new tensor.

#include <ATen/core/Tensor.h>
#include <nanobind/nanobind.h>
#include <torch/csrc/autograd/python_variable.h>

NAMESPACE_BEGIN(NB_NAMESPACE)
NAMESPACE_BEGIN(detail)

template <>
struct type_caster<at::Tensor> {
  NB_TYPE_CASTER(at::Tensor, const_name("torch.Tensor"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    if (!THPVariable_Check(source.ptr())) return false;
    value = THPVariable_Unpack(source.ptr());
    return true;
  }

  static handle from_cpp(const at::Tensor& tensor, rv_policy, cleanup_list*) noexcept {
    return THPVariable_Wrap(tensor);
  }
};

NAMESPACE_END(detail)
NAMESPACE_END(NB_NAMESPACE)
