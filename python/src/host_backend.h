// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

namespace apex::python {

void init_host_backend(nanobind::module_& m);

}  // namespace apex::python
