// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/uneven_inputs.h"

#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include <apex/error.h>

#include "comm/announcer.h"

namespace apex::parallel::detail {

namespace {

/// Encodes the announcement of a rank as numbers. The first one is whether the rank has data.
std::vector<int64_t> encode(const JoinEvent* mine) {
  if (mine == nullptr) return std::vector<int64_t>(5);
  return {1, mine->kind, mine->argument, mine->gradients_kept, mine->end_follows};
}

}  // namespace

void UnevenInputs::begin(bool divide_by_initial_world_size, std::function<void(int64_t)> announce) {
  context_.joining = true;
  context_.divisor = context_.members.size;
  divide_by_initial_ = divide_by_initial_world_size;
  announces_ends_ = false;
  set_announcer(owner_, std::move(announce));
}

void UnevenInputs::follow() { clear_announcer(owner_); }

void UnevenInputs::end() {
  context_.joining = false;
  context_.divisor = context_.members.size;
}

JoinEvent UnevenInputs::announce(const JoinEvent& event) {
  const Monitor::Change change(context_.monitor);
  try {
    return context_.monitor.open([&] { return exchange(&event); });
  } catch (...) {
    context_.owes_end = false;  // an error on every rank, so no rank waits for it
    throw;
  }
}

JoinEvent UnevenInputs::await_event() {
  follow();
  const Monitor::Change change(context_.monitor);
  return context_.monitor.open([&] { return exchange(nullptr); });
}

void UnevenInputs::announce_local_backward() {
  if (context_.joining) announce({JoinEvent::kLocalBackward});
}

void UnevenInputs::announce_end() {
  if (std::exchange(context_.owes_end, false)) announce({JoinEvent::kBackwardEnd});
}

JoinEvent UnevenInputs::exchange(const JoinEvent* mine) {
  announces_ends_ = announces_ends_ || (mine != nullptr && mine->kind == JoinEvent::kCustom);
  // An all-gather, not an all-reduce: a rank that does not join is in the all-reduce of a bucket.
  // Gloo would match the two all-reduces and end the process because their sizes differ.
  const std::vector<int64_t> said = encode(mine);
  const auto fields = static_cast<int64_t>(said.size());
  const at::Tensor all =
      context_.members.all_gather("announcement under join()", at::tensor(said, at::kLong))
          .wait()
          .view({-1, fields});
  JoinEvent event;
  bool same = true;
  at::Tensor first;
  for (int64_t rank = 0; rank < context_.members.size; ++rank) {
    const at::Tensor row = all[rank];
    const int64_t* const of_rank = row.const_data_ptr<int64_t>();
    if (of_rank[0] == 0) continue;
    if (!first.defined()) {
      first = row;
      event.kind = static_cast<JoinEvent::Kind>(of_rank[1]);
      event.argument = of_rank[2];
      event.gradients_kept = of_rank[3] != 0;
      event.end_follows = of_rank[4] != 0;
    }
    same = same && row.equal(first);
    event.active.push_back(rank);
  }
  if (!same) {
    throw RankMismatch(
        context_.me() +
        "under join() the ranks that still have data are in different calls (forward, backward, "
        "synchronized or not, or batch norms of different sizes): run the same forwards and "
        "backwards in every step on all of them");
  }
  if (!event.active.empty() && !divide_by_initial_)
    context_.divisor = static_cast<int64_t>(event.active.size());
  return event;
}

int64_t UnevenInputs::last_with_data(bool followed) {
  const Monitor::Change change(context_.monitor);
  const Membership& members = context_.members;
  const std::vector<int64_t> mine{followed ? members.size : members.rank, followed ? -1 : 0};
  const at::Tensor least = context_.monitor.open([&] {
    return members.all_reduce("end of join()", at::tensor(mine, at::kLong), c10d::ReduceOp::MIN)
        .wait();
  });
  return least[1].item<int64_t>() == 0 ? -1 : least[0].item<int64_t>();
}

}  // namespace apex::parallel::detail
