// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace apex {

/// Calls the function that was passed to set_interruption_check(). False without one.
bool is_interrupted();

}  // namespace apex
