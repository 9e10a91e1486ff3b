// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <nanobind/nanobind.h>

namespace apex::python {

/// Registers the translation of apex::Error and its subclasses to Python's built-in exceptions.
void init_errors(nanobind::module_& m);

/// In the handler of `raised`, with the GIL: throws apex::Error, `what` and then its message. What
/// is no Exception, as KeyboardInterrupt, passes through autograd unchanged.
[[noreturn]] void rethrow(nanobind::python_error& raised, const std::string& what);

}  // namespace apex::python
