// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <nanobind/nanobind.h>

namespace apex::python {

/// Finds the tensors in the output of a module: a tensor, or nested tuples, lists, dicts, sets,
/// dataclasses and other objects with attributes. Skips tensors that do not require grad. Needs the
/// GIL.
std::vector<at::Tensor> output_tensors(nanobind::handle output);

}  // namespace apex::python
