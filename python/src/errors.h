// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

namespace apex::python {

/// Registers the translation of apex::Error and its subclasses to Python's built-in exceptions.
void init_errors(nanobind::module_& m);

}  // namespace apex::python
