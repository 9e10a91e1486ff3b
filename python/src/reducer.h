// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

namespace apex::python {

/// Registers Reducer, GradBucket and the functions of apex/parallel/detail/model_sync.h.
void init_reducer(nanobind::module_& m);

}  // namespace apex::python
