// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <locale>
#include <sstream>

namespace apex::parallel {

/// A text whose numbers do not depend on the program's locale (std::locale::global()): what ranks
/// compare is the same on all of them, and what users read has 1000 and not 1.000.
struct PlainText : std::ostringstream {
  PlainText() { imbue(std::locale::classic()); }
};

}  // namespace apex::parallel
