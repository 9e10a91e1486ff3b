// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace apex::parallel {

/// Foretells which of a few recurring things comes next, from the lengths of their runs: after a,
/// a, b, a, a, b, that is a, a, b again. Ranks that have seen the same foretell the same. Not
/// thread safe.
class Recurrence {
 public:
  /// `thing`, a small number from 0, has come.
  void came(size_t thing);
  /// What comes next; nothing if nothing has come yet. A thing that has come once is expected to go
  /// on.
  std::optional<size_t> next() const;
  void forget() { *this = {}; }

 private:
  struct Run {
    int64_t length = 0;  ///< of its last run that has ended; 0: none has
    size_t successor = 0;
  };
  std::vector<Run> runs_;
  std::optional<size_t> current_;
  int64_t length_ = 0;  ///< of the run of current_
};

}  // namespace apex::parallel
