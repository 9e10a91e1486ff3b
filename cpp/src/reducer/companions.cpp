// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/companions.h"

#include <apex/error.h>

#include "reducer/reducer_core.h"

namespace apex::parallel::detail {

namespace {

/// For ranks that have probably left this backward.
constexpr std::chrono::seconds kLastWait{2};

}  // namespace

void Companions::set(const std::vector<std::shared_ptr<ReducerCore>>& in_graph,
                     const ReducerCore* self) {
  others_.clear();
  for (const auto& core : in_graph) {
    if (core.get() != self) others_.push_back(core);
  }
}

void Companions::tell() const {
  for (const auto& held : others_) {
    if (const auto other = held.lock()) other->give_up_soon();
  }
}

void Companions::give_up_soon() { gives_up_ = std::chrono::steady_clock::now() + kLastWait; }

void Companions::look() {
  for (const auto& held : others_) {
    if (const auto other = held.lock()) other->compare_early();
  }
  const std::string found = error();
  if (!found.empty() && !gives_up_) give_up_soon();
  if (!gives_up_ || std::chrono::steady_clock::now() < *gives_up_) return;
  throw RankMismatch(found.empty() ? "another reducer of this backward has thrown" : found);
}

std::string Companions::error() const {
  for (const auto& held : others_) {
    const auto other = held.lock();
    if (!other) continue;
    std::string found = other->out_of_step();
    if (!found.empty()) return found;
  }
  return {};
}

}  // namespace apex::parallel::detail
