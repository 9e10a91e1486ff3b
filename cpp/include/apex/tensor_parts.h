// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <apex/export.h>

namespace apex {

/// Sets how the engine finds the tensors that a tensor without memory of its own consists of: for a
/// subclass written in Python, its inner tensors. The function returns them in one order on every
/// rank, or nothing if it does not know the tensor, whose values are then read and written by its
/// own operators. What it throws is the reason why the tensor cannot be synchronized.
///
/// @param parts       called for such tensors only, on any thread; empty: no tensor is known.
/// @param keep_error  called while an exception is handled that such an operator has thrown. The
///                    exception may be thrown again later, on another thread: what it refers to in
///                    the thread's state is to be moved into it.
/// Python's module sets functions that call `__tensor_flatten__`, and fetch Python's error. Thread
/// safe; blocks nothing.
APEX_API void set_tensor_parts(
    std::function<std::vector<at::Tensor>(const at::Tensor& tensor)> parts,
    std::function<void()> keep_error = {});

/// The tensors that hold the values of `tensor`: what that function finds, and theirs; or `tensor`
/// itself, if it has memory of its own or nobody knows its parts. Throws what the function throws.
APEX_API std::vector<at::Tensor> parts_of(const at::Tensor& tensor);

}  // namespace apex
