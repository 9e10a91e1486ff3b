// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

namespace apex::python {

/// Where ranks wait for this process, it tells them where its Python code is.
void init_stack_reader(nanobind::module_& m);

}  // namespace apex::python
