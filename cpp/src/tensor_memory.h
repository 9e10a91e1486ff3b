// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace apex {

// Note [Tensors without memory]
//
// A strided tensor may have no memory. A subclass written in Python may hold inner tensors and
// implement every operator itself, a meta tensor has only a shape, and a ZeroTensor of autograd
// stores no elements. Their data pointers are null, and so are the data pointers of tensors that an
// operator such as cat makes from them. So code calls has_memory() before it takes an address. A
// gradient without memory is copied by its operators, and replaced by the average. A trainable
// parameter without memory is refused. Other parameters and buffers without memory are not
// synchronized.

/// Whether the data pointer of `tensor` points to its values, with its strides.
bool has_memory(const at::Tensor& tensor);

/// The values of `tensor` in strided memory: `tensor` itself if it has memory, else a copy. The
/// copy may have a grad_fn if grad mode is enabled.
at::Tensor in_memory(const at::Tensor& tensor);

/// Why the values of `tensor` cannot be sent to other ranks; empty if they can, and for a subclass
/// without memory.
std::string why_not_sendable(const at::Tensor& tensor);

}  // namespace apex
