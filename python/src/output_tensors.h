// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <nanobind/nanobind.h>

namespace apex::python {

/// The tensors in what a module returned: a tensor, or tuples, lists, dicts, sets, dataclasses and
/// other objects with attributes that hold tensors, nested. Tensors that do not require grad are
/// left out. Needs the GIL.
std::vector<at::Tensor> output_tensors(nanobind::handle output);

}  // namespace apex::python
