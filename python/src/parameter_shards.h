// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

namespace apex::python {

/// Registers apex::parallel::ParameterShards as _core.ParameterShards.
void init_parameter_shards(nanobind::module_& m);

}  // namespace apex::python
