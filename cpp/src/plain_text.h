// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <locale>
#include <sstream>

namespace apex::parallel {

/// A string stream that ignores the program's locale (std::locale::global()). Texts that ranks
/// compare are then the same on all of them, and messages contain 1000, not 1.000.
struct PlainText : std::ostringstream {
  PlainText() { imbue(std::locale::classic()); }
};

}  // namespace apex::parallel
