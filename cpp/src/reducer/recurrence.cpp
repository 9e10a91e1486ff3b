// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/recurrence.h"

#include <algorithm>

namespace apex::parallel {

void Recurrence::came(size_t thing) {
  runs_.resize(std::max(runs_.size(), thing + 1));
  if (current_ == thing) {
    ++length_;
    return;
  }
  if (current_) runs_[*current_] = {length_, thing};
  current_ = thing;
  length_ = 1;
}

std::optional<size_t> Recurrence::next() const {
  if (!current_) return std::nullopt;
  const Run& last = runs_[*current_];
  return length_ == last.length ? last.successor
                                : *current_;  // a run that is longer may be of any length
}

}  // namespace apex::parallel
