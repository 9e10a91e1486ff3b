#include <ATen/Functions.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "parallel/reducer_state.h"

namespace apex::parallel::detail {

// Note [Uneven inputs]
//
// A rank that has run out of data cannot know what the others do next: whether their next backward is
// synchronized, whether another forward comes first, or whether they have ended, too. So while ranks
// join, whoever has data announces each step in a small all-gather, to which a rank without data
// contributes zeros, and from which it learns what to take part in. Everything happens in the order of
// the announcements, so it is the same on every rank.

JoinEvent ReducerState::exchange_event(bool active, JoinEvent::Kind kind, int64_t argument) {
  // Gathered, not summed: a rank that does not join is in the all-reduce of a bucket. Gloo would take a sum for it, and
  // end the process because its size is another.
  const std::string what = "announcement under join()";
  const GroupPtr& group = groups_.front();
  const at::Device device = control_device(group, parameters_.front().variable.device());
  const at::Tensor mine = at::tensor({int64_t{active}, int64_t{kind}, argument}, at::kLong).to(device);
  at::Tensor all = at::empty({3 * world_size_}, mine.options());
  wait_collective(all_gather_flat(what, *group, all, mine), what, *group);
  all = all.cpu();
  const int64_t* said = all.const_data_ptr<int64_t>();
  JoinEvent event;
  bool same = true;
  for (int rank = 0; rank < world_size_; ++rank, said += 3) {
    if (said[0] == 0) continue;
    if (event.active.empty()) {
      event.kind = static_cast<JoinEvent::Kind>(said[1]);
      event.argument = said[2];
    }
    same = same && said[1] == event.kind && said[2] == event.argument;
    event.active.push_back(rank);
  }
  if (event.active.empty()) return event;
  if (!same) {
    throw RankMismatch(
        "rank " + std::to_string(rank_) +
        ": under join() the ranks that still have data do different things at the same time (forward, "
        "backward, synchronized or not, or batch norms of different sizes): every step has to run the "
        "same forwards and backwards on all of them");
  }
  active_ranks_ = static_cast<int64_t>(event.active.size());
  return event;
}

void ReducerState::shadow_backward_begin(bool kept) {
  if (scope_ != nullptr) throw Error("shadow_backward_begin() while a backward is running");
  for (Parameter& parameter : parameters_) {
    // The others have cleared their gradients, so this rank's must not count either; what has never
    // been reduced still has to.
    if (!kept && !parameter.touched) parameter.variable.mutable_grad() = at::Tensor();
  }
  shadow_ = std::make_shared<BackwardScope>(shared_from_this());
  scope_ = shadow_.get();
  choose_plan();
  prepare_backward();
  asks_to_relearn_ = false;  // what is trainable is for those who have data to say
  if (!learning_ && !options_.delay_allreduce) {
    // As early as the others could: nothing here is waited for.
    const size_t end = entries_.size() - (last_at_end_ ? 1 : 0);
    while (next_launch_ < end && !waits_for_chain(next_launch_)) launch(next_launch_);
  }
}

void ReducerState::shadow_backward_end() {
  if (!shadow_) throw Error("shadow_backward_end() without shadow_backward_begin()");
  const auto shadow = std::move(shadow_);
  shadow->end();
}

int64_t ReducerState::last_with_data(bool followed, int64_t scalers) const {
  const std::vector<int64_t> mine{followed ? world_size_ : rank_, followed ? -1 : 0, scalers, -scalers};
  const at::Tensor least = agree(at::tensor(mine, at::kLong), c10d::ReduceOp::MIN, "end of join()");
  const int64_t fewest = least[2].item<int64_t>();
  const int64_t most = -least[3].item<int64_t>();
  if (fewest != most) {
    throw RankMismatch("rank " + std::to_string(rank_) + ": at the end of join() this rank has " +
                       std::to_string(scalers) + " loss scalers to take over, others between " +
                       std::to_string(fewest) + " and " + std::to_string(most) +
                       "; give join(scalers=...) as many on every rank, and call amp.initialize() on "
                       "all of them or on none.");
  }
  return least[1].item<int64_t>() == 0 ? -1 : least[0].item<int64_t>();
}

}  // namespace apex::parallel::detail
