// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/uneven_inputs.h"

#include <string>
#include <vector>

#include <ATen/Functions.h>

#include <apex/error.h>

namespace apex::parallel::detail {

JoinEvent exchange_join_event(const ReducerContext& context, bool active, JoinEvent::Kind kind,
                              int64_t argument) {
  // Gathered, not summed: a rank that does not join is in the all-reduce of a bucket. Gloo would
  // take a sum for it, and end the process because its size is another.
  const at::Tensor mine = at::tensor({int64_t{active}, int64_t{kind}, argument}, at::kLong);
  const at::Tensor all = context.members.all_gather("announcement under join()", mine).wait();
  const int64_t* said = all.const_data_ptr<int64_t>();
  JoinEvent event;
  bool same = true;
  for (int rank = 0; rank < context.members.size; ++rank, said += 3) {
    if (said[0] == 0) continue;
    if (event.active.empty()) {
      event.kind = static_cast<JoinEvent::Kind>(said[1]);
      event.argument = said[2];
    }
    same = same && said[1] == event.kind && said[2] == event.argument;
    event.active.push_back(rank);
  }
  if (same) return event;
  throw RankMismatch(
      context.me() +
      "under join() the ranks that still have data do different things at the same time (forward, "
      "backward, synchronized or not, or batch norms of different sizes): every step has to run "
      "the "
      "same forwards and backwards on all of them");
}

int64_t last_with_data(const ReducerContext& context, bool followed, int64_t states) {
  const Membership& members = context.members;
  const std::vector<int64_t> mine{followed ? members.size : members.rank, followed ? -1 : 0, states,
                                  -states};
  const at::Tensor least =
      members.all_reduce("end of join()", at::tensor(mine, at::kLong), c10d::ReduceOp::MIN).wait();
  const int64_t fewest = least[2].item<int64_t>();
  const int64_t most = -least[3].item<int64_t>();
  if (fewest != most) {
    throw RankMismatch(
        context.me() + "at the end of join() this rank has " + std::to_string(states) +
        " loss scalers to take over, others between " + std::to_string(fewest) + " and " +
        std::to_string(most) +
        "; give join(scalers=...) as many on every rank, and call amp.initialize() on "
        "all of them or on none.");
  }
  return least[1].item<int64_t>() == 0 ? -1 : least[0].item<int64_t>();
}

}  // namespace apex::parallel::detail
