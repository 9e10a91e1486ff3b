// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <nanobind/nanobind.h>

namespace apex::python {

/// Registers apex::amp::LossScaler as _core.LossScaler.
void init_loss_scaler(nanobind::module_& m);

}  // namespace apex::python
