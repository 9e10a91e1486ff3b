// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <locale>
#include <sstream>
#include <string>

namespace apex::parallel {

/// A string stream that ignores the program's locale (std::locale::global()). Texts that ranks
/// compare are then the same on all of them, and messages contain 1000, not 1.000.
struct PlainText : std::ostringstream {
  PlainText() { imbue(std::locale::classic()); }
};

/// The beginning of the UTF-8 character that `position` lies in, or the text's length. Texts are
/// cut there, because Python refuses a part of a character.
inline size_t character_before(const std::string& text, size_t position) {
  position = std::min(position, text.size());
  while (position > 0 && position < text.size() &&
         (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80)
    --position;
  return position;
}

/// "rank 1 of 4".
inline std::string rank_of(int rank, int size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size);
}

}  // namespace apex::parallel
