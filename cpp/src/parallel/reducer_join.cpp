#include <ATen/Functions.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "parallel/reducer_state.h"

namespace apex::parallel::detail {

// Note [Uneven inputs]
//
// A rank that has run out of data cannot know what the others do next: whether their next backward is
// synchronized, whether another forward comes first, or whether they have ended, too. So while ranks
// join, whoever has data announces each step in a small all-reduce, to which a rank without data
// contributes zeros, and from which it learns what to take part in. Everything happens in the order of
// the announcements, so it is the same on every rank.

JoinEvent ReducerState::exchange_event(bool active, JoinEvent::Kind kind, int64_t argument) {
  // [active, kind, kind^2, argument, argument^2, active by rank...]: all active ranks announce the same
  // exactly if the mean of squares is the square of the mean.
  std::vector<int64_t> mine(5 + world_size_, 0);
  if (active) {
    mine[0] = 1;
    mine[1] = kind;
    mine[2] = kind * kind;
    mine[3] = argument;
    mine[4] = argument * argument;
    mine[5 + rank_] = 1;
  }
  const at::Tensor sums =
      agree(at::tensor(mine, at::kLong), c10d::ReduceOp::SUM, "announcement under join()");
  const int64_t* sum = sums.const_data_ptr<int64_t>();
  JoinEvent event;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (sum[5 + rank] != 0) event.active.push_back(rank);
  }
  const int64_t ranks = sum[0];
  if (ranks == 0) return event;
  if (sum[1] * sum[1] != sum[2] * ranks || sum[3] * sum[3] != sum[4] * ranks) {
    throw RankMismatch(
        "rank " + std::to_string(rank_) +
        ": under join() the ranks that still have data do different things at the same time (forward, "
        "backward, synchronized or not, or batch norms of different sizes): every step has to run the "
        "same forwards and backwards on all of them");
  }
  event.kind = static_cast<JoinEvent::Kind>(sum[1] / ranks);
  event.argument = sum[3] / ranks;
  active_ranks_ = ranks;
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
