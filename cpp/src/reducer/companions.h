// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace apex::parallel::detail {

class ReducerCore;

// Note [Out of step in one of several]
//
// The reducers of one backward end one after the other. If a rank has left one of them out of a
// backward, the others wait for it there until its next backward, while it waits for them in
// another reducer of that. The messages by which the two would find out have arrived by then. So
// who waits for long looks at the other reducers of its backward: for one whose facts differ the
// exchange that compares ranks is begun at once. It is not waited for, as the others may merely be
// late, and first compare another reducer. And who has thrown waits no longer than two seconds for
// ranks that will not come.

/// The other reducers of a backward, as one of them sees them. Belongs to one backward.
class Companions {
 public:
  void set(const std::vector<std::shared_ptr<ReducerCore>>& in_graph, const ReducerCore* self);
  void forget() { *this = {}; }
  bool empty() const { return others_.empty(); }

  /// This reducer throws since ranks are out of step: the others need not come to the rest of this
  /// backward.
  void tell() const;
  /// A companion has said so.
  void give_up_soon();

  /// While this reducer waits: lets the others compare steps.
  /// @throws RankMismatch when there is no more to wait for.
  void look();
  /// The error of one that has been found to be out of step, or empty.
  std::string error() const;

 private:
  std::vector<std::weak_ptr<ReducerCore>> others_;
  std::optional<std::chrono::steady_clock::time_point> gives_up_;  ///< when
};

}  // namespace apex::parallel::detail
