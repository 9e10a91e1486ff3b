// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace apex {

/// Asks the function that set_interruption_check() was given.
bool is_interrupted();

}  // namespace apex
