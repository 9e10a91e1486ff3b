// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

namespace apex::python {

/// Registers functions that report the Python stack of this process to ranks that wait for it.
void init_stack_reader(nanobind::module_& m);

}  // namespace apex::python
