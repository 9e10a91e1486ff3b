// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include <apex/tensor_parts.h>

namespace apex {

// Note [Tensors without memory]
//
// A strided tensor may have no memory. A subclass written in Python may hold inner tensors and
// implement every operator itself, a meta tensor has only a shape, and a ZeroTensor of autograd
// stores no elements. Their data pointers are null, and so are the data pointers of tensors that an
// operator such as cat makes from them. So code calls has_memory() before it takes an address. If
// the parts of a tensor are known, its values are synchronized part by part, because an operator on
// a tensor of two parts may copy one of them over the other. Other tensors are copied by
// in_memory(), which uses their own operators.

/// Whether the data pointer of `tensor` points to its values, with its strides.
bool has_memory(const at::Tensor& tensor);

/// The values of `tensor` in strided memory: `tensor` itself if it has memory, else a copy. The
/// copy may have a grad_fn if grad mode is enabled.
at::Tensor in_memory(const at::Tensor& tensor);

/// Calls the `keep_error` function of set_tensor_parts(). Call it in the handler of an exception
/// that an operator on a tensor without memory has thrown.
void keep_error();

/// Calls `operators`, which use a tensor without memory. If it throws, calls keep_error() first.
template <typename Operators>
auto by_operators(const Operators& operators) {
  try {
    return operators();
  } catch (...) {
    keep_error();
    throw;
  }
}

/// Why the values of `tensor` cannot be sent to other ranks; empty if they can.
std::string why_not_sendable(const at::Tensor& tensor);

}  // namespace apex
