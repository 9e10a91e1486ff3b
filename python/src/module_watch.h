// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

namespace apex::python {

/// Registers ModuleWatch, which detects parameters and submodules that were added, removed or
/// replaced.
void init_module_watch(nanobind::module_& m);

}  // namespace apex::python
