// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <apex/export.h>

namespace apex {

/// Sets how the reducer finds the inner tensors of a tensor without its own storage, such as a
/// tensor subclass written in Python. `parts` returns them in the same order on every rank, or an
/// empty list for an unknown tensor, whose values are then read and written by its own operators.
/// If it throws, the exception says why the tensor cannot be synchronized.
///
/// @param parts       called only for such tensors, on any thread; empty: no tensor has known
///                    parts.
/// @param keep_error  called while handling an exception of such an operator. The exception may be
///                    rethrown later on another thread, so keep_error must copy the thread-local
///                    state of the error into the exception.
///
/// The Python module sets functions that call `__tensor_flatten__` and fetch Python's error. Thread
/// safe; does not block.
APEX_API void set_tensor_parts(
    std::function<std::vector<at::Tensor>(const at::Tensor& tensor)> parts,
    std::function<void()> keep_error = {});

/// The tensors that hold the values of `tensor`: its inner tensors, found recursively by the
/// function above, or `tensor` itself if it has its own storage or its parts are unknown.
/// Exceptions of that function propagate.
APEX_API std::vector<at::Tensor> parts_of(const at::Tensor& tensor);

}  // namespace apex
