// SPDX-License-Identifier: BSD-3-Clause
#include "comm/membership.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <ATen/Functions.h>

#include <apex/parallel/detail/model_sync.h>

#include "comm/collectives.h"
#include "comm/separate_group.h"
#include "endings.h"
#include "torch_version.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

at::Tensor ControlMessage::wait(const std::function<void()>& meanwhile) const {
  if (work_) wait_collective(work_, what_, *group_, meanwhile);
  return result_.cpu();
}

void ControlMessage::order() const {
  if (work_ && !result_.is_cpu()) wait_collective(work_, what_, *group_);
}

bool ControlMessage::arrived() const {
  return result_.defined() && (!work_ || (work_->isCompleted() && !work_->exception()));
}

Membership::Membership(std::vector<GroupPtr> given)
    : parent(given.empty() ? nullptr : given.front()),
      groups(std::move(given)),
      rank(parent ? parent->getRank() : 0),
      size(parent ? parent->getSize() : 1) {
  keep();
}

// Note [The last reference to a group]
//
// A reducer keeps the user's group alive after destroy_process_group(), and a graph with the
// reducer's hooks keeps the reducer alive. So dropping the last loss may drop the last reference to
// that group; see Note [Where a group ends]. No thread can tell whether its reference is the last
// one, since others may drop theirs at the same time. So all copies of a membership share one more
// reference to the groups, which another thread drops.

namespace {

struct Kept {
  std::vector<GroupPtr> groups;
  std::vector<GroupPtr> separate;  ///< those of `groups` that no user has
  const int64_t pid = this_pid();

  Kept(std::vector<GroupPtr> all, std::vector<GroupPtr> own)
      : groups(std::move(all)), separate(std::move(own)) {}
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    if (pid != this_pid()) {  // forked: the groups' threads, which would be joined, do not exist
      new std::vector<GroupPtr>(std::move(groups));
      return;
    }
    const bool failed = std::any_of(groups.begin(), groups.end(), [](const GroupPtr& group) {
      return group && has_failed(*group);
    });
    // Do not wait for ranks that will not join.
    for (const GroupPtr& group : separate)
      if (failed) host_backend_of(*group)->give_up("a collective of this group has failed");
    separate.clear();
    end_elsewhere([all = std::move(groups)]() mutable { all.clear(); }, failed);
  }
};

}  // namespace

void Membership::keep(std::vector<GroupPtr> separate) {
  if (!parent) return;
  std::vector<GroupPtr> all = groups;
  all.push_back(parent);
  kept = std::make_shared<Kept>(std::move(all), std::move(separate));
}

void Membership::separate(bool on_cpu) {
  if (alone()) return;
  // Ranks may have constructed different numbers of reducers, since a construction may fail; the
  // name must be new on all of them.
  static std::atomic<int64_t> next_name{0};
  const at::Tensor mine = at::tensor({next_name.load(), int64_t{on_cpu}}, at::kLong);
  const at::Tensor all =
      all_reduce("naming of a communicator", mine, c10d::ReduceOp::MAX).wait().contiguous();
  const int64_t name = all.const_data_ptr<int64_t>()[0];
  const bool connects = all.const_data_ptr<int64_t>()[1] != 0;
  // Other threads may have advanced it already.
  for (int64_t next = next_name;
       next <= name && !next_name.compare_exchange_weak(next, name + 1);) {
  }
  std::vector<GroupPtr> separate;
  for (size_t i = 0; i < groups.size(); ++i) {
    const GroupPtr given = groups[i];
    const std::string unique = "apex/reducer/" + detail::group_name_of(*parent) + "/" +
                               std::to_string(name) + "/" + std::to_string(i);
    groups[i] = make_separate_group(given, unique, connects);
    if (groups[i] != given) separate.push_back(groups[i]);
    watch_with(*groups[i], *parent, unique);
  }
  shares_groups = separate.size() < groups.size();
  keep(std::move(separate));
}

void Membership::release() {
  groups.clear();
  parent.reset();
  kept.reset();
}

at::Device Membership::control_device() const {
  return apex::parallel::control_device(control(), device);
}

ControlMessage Membership::all_reduce(const std::string& what, const at::Tensor& mine,
                                      c10d::ReduceOp::RedOpType op) const {
  if (alone()) return {what, nullptr, nullptr, mine.clone()};
  at::Tensor message = mine.to(control_device(), mine.scalar_type(), false, /*copy=*/true);
  auto work = issue_all_reduce(what, *control(), message, op);
  return {what, control(), std::move(work), message};
}

ControlMessage Membership::all_gather(const std::string& what, const at::Tensor& mine,
                                      const at::Tensor& gathered) const {
  if (alone()) return {what, nullptr, nullptr, mine.reshape({-1}).clone()};
  const at::Tensor share = mine.to(control_device());
  const at::Tensor all =
      gathered.defined() ? gathered : at::empty({size * share.numel()}, share.options());
  auto work = issue_all_gather(what, *control(), all, share);
  return {what, control(), std::move(work), all};
}

}  // namespace apex::parallel
