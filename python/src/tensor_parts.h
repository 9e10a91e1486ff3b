// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

namespace apex::python {

void init_tensor_parts(nanobind::module_& m);

}  // namespace apex::python
