// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include <apex/tensor_parts.h>

namespace apex {

// Note [Tensors without memory]
//
// A strided tensor need not have memory: a subclass written in Python may hold other tensors and
// answer every operator itself, a tensor on meta has a shape only, and one of zeros that autograd
// has made has no elements stored. Their data pointer is null, and so is that of what an operator
// such as cat makes of them. So whoever takes an address asks has_memory() first. Values are
// synchronized part by part, if the tensor says which parts it has: an operator of a tensor of two
// parts may copy one of them over the other. Of other tensors in_memory() is a copy that their own
// operators make.

/// Whether the values of `tensor` lie, strided, where its data pointer points.
bool has_memory(const at::Tensor& tensor);

/// The values of `tensor`, strided, in memory: itself if it has that, else a copy, which may have a
/// history where gradients are enabled.
at::Tensor in_memory(const at::Tensor& tensor);

/// In a handler of what an operator of a tensor without memory has thrown.
void keep_error();

/// Calls `operators`, which are those of a tensor without memory.
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
