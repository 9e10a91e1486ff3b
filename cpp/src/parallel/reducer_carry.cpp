#include <chrono>
#include <cstring>
#include <tuple>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "parallel/reducer_state.h"

namespace apex::parallel::detail {

// Note [Carried through]
//
// Ranks that have begun a synchronized backward wait for each other's buckets. A rank that cannot send its own, or
// does not want to, may therefore not just stay away: the messages of its next backward would meet those that
// the others still wait for, of other sizes. So a backward that was begun is carried through on every rank, with
// zeros where a rank has nothing to send, and facts in the last message that tell why:
//
// - it failed: an exception ended its backward, in the module, in a hook, or in a callback. Then
//   nothing of this backward counts: every rank throws, and all can go on with the next backward;
// - it left the plan (relearn(), another communication hook ...), which may well have happened on
//   all ranks: then all make a new plan and reduce their gradients by that. If some have kept the
//   plan, every rank throws.
//
// Whoever reads such a fact exchanges details with the others, in which all ranks take part, also those that sent
// it: without waiting for the answer, since they may be in a destructor. They have no more to say; so nobody may
// expect them in another exchange of that backward.
//
// A rank whose messages were all sent when it failed has done its part, and the others have their average. It waits
// for them then, since the facts in these messages may lead to an exchange; the exception is thrown after that.

namespace {

/// Ranks may differ in who updates what for good reason; then they are not asked for ever.
constexpr int64_t kMostHarmlessDifferences = 3;

/// For ranks that have probably left this backward.
constexpr std::chrono::seconds kLastWait{2};

constexpr const char* kDetails = "exchange of what the ranks did in this step";

/// A rank failed, or has left the plan while others have kept it.
bool must_refuse(const SeenFacts& seen) { return seen.failed() || (seen.plan_left() && seen.plan_kept()); }

/// FNV-1a, 64 bit (Fowler, Noll, Vo).
uint64_t extend_digest(uint64_t hash, const void* data, size_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ begin[i]) * 1099511628211ULL;
  return hash;
}

}  // namespace

/// What this rank says in this backward from now on.
StepFacts ReducerState::facts_of_step() {
  facts_sent_ = steps_.facts();
  facts_sent_.wants_rebuild = asks_to_relearn_;
  facts_sent_.left_plan = !carried_.empty();
  facts_sent_.compared = options_.check_steps.value_or(true) && !joining_;
  return facts_sent_;
}

/// Launches, as this rank's part of a backward, what `entries` still have to send: zeros.
void ReducerState::send_absent(std::vector<Entry>& entries, const std::shared_ptr<CommHook>& hook,
                               const StepFacts& facts) {
  for (size_t b = 0; b < entries.size(); ++b) {
    Entry& entry = entries[b];
    if (entry.launched || entry.bucket.kind() == Bucket::Kind::kSparse) continue;
    entry.launched = true;
    const c10::OptionalDeviceGuard guard(entry.bucket.device());
    const bool hooked = hook && entry.goes_through_hook();
    // Without facts nobody would notice zeros.
    const bool poison = facts.failed && !entries.back().bucket.carries_facts();
    const at::Tensor message = entry.bucket.absent_message(facts.encode(), poison);
    if (hooked) {
      if (hook_failed_) continue;
      GradientBucket view;
      view.index = static_cast<int64_t>(b);
      view.is_last = b == last_hooked_;
      view.buffer = message.narrow(0, 0, entry.bucket.data_numel());
      view.gradients = entry.bucket.views_of(view.buffer);
      for (const Bucket::Slot& slot : entry.bucket.slots()) view.parameters.push_back(slot.variable);
      entry.future = hook->run(view);
      if (hook->may_chain()) entry.future->wait();
      continue;
    }
    const GroupPtr& group = group_of(b);
    c10d::AllreduceOptions options;
    options.reduceOp = entry.average_on_wire ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    std::vector<at::Tensor> tensors{message};
    // Named as by the ranks whose gradients travel in it: see Note [Ranks in different collectives].
    entry.work = call_collective(describe_bucket(entries, b, hook.get()), *group,
                                 [&] { return group->allreduce(tensors, options); });
    entry.absent = message;
  }
}

/// An exception has ended the backward of this rank: the others are told. Does not wait for them, unless a
/// communication hook does.
void ReducerState::send_failure() noexcept {
  if (world_size_ == 1 || groups_.empty() || broken_ || told_) return;
  try {
    StepFacts facts;
    facts.failed = true;
    bool heard = true;
    if (!carried_.empty()) {
      send_absent(carried_, carried_hook_, facts);
      for (Entry& entry : carried_) entry.launched = false;  // to be carried again
    } else if (learning_) {
      start_plan_exchange(facts);
    } else if (next_launch_ < entries_.size()) {
      send_absent(entries_, comm_hook_, facts);
      heard = carries_facts();
    } else {
      return;  // its part is done
    }
    if (!heard) return;
    failure_ = gather_details(pack_details(/*failed=*/true));
    told_ = true;
  } catch (...) {
    broken_ = true;
  }
}

/// Before the next backward: what the others did in the one in which this rank failed.
void ReducerState::look_back_on_failure() {
  const auto [work, all] = std::exchange(failure_, {});
  if (std::exchange(hook_failed_, false) && work) {
    wait_collective(work, kDetails, *groups_.front());
    broken_ = hooks_are_apart(decode_details(all));
  }
}

/// This rank failed in a backward when all its messages were on their way.
void ReducerState::follow_the_others() noexcept {
  try {
    const SeenFacts seen = await_facts(entries_);
    if (must_refuse(seen)) {
      broken_ = hooks_are_apart(exchange_details());
      return;
    }
    compare_steps(seen, trainable_anywhere());
    if (seen.rebuild_wanted()) {
      relearn_now();
    } else {
      tune();
    }
    if (set_in_force_) recurrence_.came(*set_in_force_);
  } catch (...) {
    broken_ = true;
  }
}

/// Takes part in a backward by the plan that this rank has left, and lets go of it if all ranks have left it.
void ReducerState::carry_left_plan() {
  send_absent(carried_, carried_hook_, facts_of_step());
  try {
    refuse_failed_step(await_facts(carried_));
    for (size_t b = 0; b < carried_.size(); ++b) {
      // Of the plan's other messages nothing is wanted, but that they do not come in the way of the next.
      if (carried_[b].work) wait_collective(carried_[b].work, kDetails, *group_of(b));
      if (carried_[b].future) wait_future(*carried_[b].future, kDetails, *group_of(b));
    }
  } catch (const CommunicationError&) {
    throw;
  } catch (...) {
    for (Entry& entry : carried_) entry.launched = false;
    throw;
  }
  carried_.clear();
  carried_hook_.reset();
  reason_to_leave_ = ReasonToLeave::kNone;
}

/// Waits for the message that carries facts, and reads them.
SeenFacts ReducerState::await_facts(std::vector<Entry>& entries) {
  if (entries.empty() || !entries.back().bucket.carries_facts()) return SeenFacts(0);
  Entry& last = entries.back();
  if (last.work) {
    const size_t index = entries.size() - 1;
    await_work(last.work, &entries == &entries_ ? describe_bucket(index) : kDetails, group_of(index));
    last.work.reset();
  }
  return SeenFacts(last.bucket.facts_of_any(last.absent));
}

/// Throws on every rank, if need be.
void ReducerState::refuse_failed_step(const SeenFacts& seen) {
  if (!must_refuse(seen)) return;
  const std::vector<StepDetails> ranks = exchange_details();
  broken_ = hooks_are_apart(ranks);
  for (Parameter& parameter : parameters_) parameter.touched = false;
  told_ = true;
  throw RankMismatch(describe_difference(rank_, ranks) + note_on_ranks(*groups_.front()));
}

/// Notes the error, to be thrown on every rank, if ranks are out of step.
void ReducerState::compare_steps(const SeenFacts& seen, const std::vector<bool>& trainable) {
  if (steps_compared_) return;
  if (!details_.work && !may_differ(seen)) {
    steps_compared_ = true;
    return;
  }
  if (!details_.work) start_details();
  while (!steps_compared_) {
    wait_collective(details_.work, kDetails, *groups_.front());
    take_details(trainable);
  }
}

bool ReducerState::may_differ(const SeenFacts& seen) const {
  return seen.differ() && harmless_differences_ < kMostHarmlessDifferences;
}

void ReducerState::start_details(std::optional<int64_t> digest) {
  at::Tensor mine = pack_details(/*failed=*/false);
  if (digest) mine.select(0, StepDetails::kFields - 1).fill_(*digest);
  std::tie(details_.work, details_.all) = gather_details(mine);
  details_.have_digests = digest.has_value();
}

/// Of an exchange that has ended: decides, or asks for digests, too.
void ReducerState::take_details(const std::vector<bool>& trainable) {
  const auto [work, all, have_digests] = std::exchange(details_, {});
  const std::vector<StepDetails> ranks = decode_details(all);
  if (!have_digests && needs_digests(ranks)) {
    start_details(digest_of_parameters(trainable));
    return;
  }
  steps_compared_ = true;
  const std::string error = describe_difference(rank_, ranks);
  if (error.empty()) {
    ++harmless_differences_;
  } else if (out_of_step_.empty()) {
    out_of_step_ = error + note_on_ranks(*groups_.front());
  }
}

// Note [Out of step in one of several]
//
// The reducers of one backward end one after the other. If a rank has left one of them out of a backward, the others
// wait for it there until its next backward, while it waits for them in another reducer of that. The messages by
// which the two would find out have arrived by then. So who waits for long looks at the other reducers of its
// backward: for one whose facts differ the exchange that compares ranks is begun at once. It is not waited for, as the
// others may merely be late, and first compare another reducer. And who has thrown waits no longer than kLastWait
// for ranks that will not come.

void ReducerState::accompany(const std::vector<std::shared_ptr<ReducerState>>& in_graph) {
  const Lock lock(mutex_);
  companions_.clear();
  for (const auto& state : in_graph) {
    if (state.get() != this) companions_.push_back(state);
  }
}

/// Ranks are out of step, and throw: the others need not come to the rest of this backward.
void ReducerState::tell_companions() {
  for (const auto& held : companions_) {
    const auto companion = held.lock();
    if (!companion) continue;
    const Lock lock(companion->mutex_);
    companion->gives_up_ = std::chrono::steady_clock::now() + kLastWait;
  }
}

/// Begins to compare steps, or goes on with it, if that does not have to wait.
void ReducerState::compare_early() {
  const Lock lock(mutex_);
  if (scope_ == nullptr || learning_ || !carried_.empty() || !carries_facts() || steps_compared_) return;
  // Other exchanges may come first, and a callback may step an optimizer, which changes what is compared.
  if (last_at_end_ || callback_) return;
  const Entry& last = entries_.back();
  const auto arrived = [](const auto& work) { return work && work->isCompleted() && !work->exception(); };
  try {
    if (!details_.work && last.launched && arrived(last.work)) {
      const SeenFacts seen(last.bucket.facts_of_any(last.absent));
      if (!must_refuse(seen) && may_differ(seen)) start_details();
    } else if (arrived(details_.work)) {
      take_details(trainable_anywhere());
    }
  } catch (const CommunicationError&) {
    // It will be found where it is waited for.
  }
}

/// The error of one that has been found to be out of step, or empty.
std::string ReducerState::error_of_companions() const {
  for (const auto& held : companions_) {
    const auto companion = held.lock();
    if (!companion) continue;
    const Lock lock(companion->mutex_);
    if (!companion->out_of_step_.empty()) return companion->out_of_step_;
  }
  return {};
}

void ReducerState::look_meanwhile() {
  for (const auto& held : companions_) {
    if (const auto companion = held.lock()) companion->compare_early();
  }
  const std::string error = error_of_companions();
  if (!error.empty() && !gives_up_) gives_up_ = std::chrono::steady_clock::now() + kLastWait;
  if (!gives_up_ || std::chrono::steady_clock::now() < *gives_up_) return;
  broken_ = true;
  throw RankMismatch(error.empty() ? "another reducer of this backward has thrown" : error);
}

/// Waits for a message of this backward.
void ReducerState::await_work(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what,
                              const GroupPtr& group) {
  if (companions_.empty()) {
    wait_collective(work, what, *group);
    return;
  }
  try {
    wait_collective(work, what, *group, [this] { look_meanwhile(); });
  } catch (const CommunicationError&) {
    broken_ = true;
    const std::string error = error_of_companions();
    if (!error.empty()) throw RankMismatch(error);  // the rank that has found out has ended
    throw;
  }
}

at::Tensor ReducerState::pack_details(bool failed) const {
  StepDetails details;
  details.facts = facts_sent_;
  details.facts.failed = failed;
  details.backward = backwards_begun_;
  details.hook_failed = hook_failed_;
  details.reason = static_cast<int64_t>(reason_to_leave_);
  const at::Device device = control_device(groups_.front(), parameters_.front().variable.device());
  return at::tensor(details.encode(), at::kLong).to(device);
}

/// Issues the exchange of `mine`: its work, and where every rank's row will be.
std::pair<c10::intrusive_ptr<c10d::Work>, at::Tensor> ReducerState::gather_details(const at::Tensor& mine) const {
  const at::Tensor all = at::empty({world_size_ * mine.numel()}, mine.options());
  return {all_gather_flat(kDetails, *groups_.front(), all, mine), all};
}

std::vector<StepDetails> ReducerState::exchange_details() {
  const auto [work, all] = gather_details(pack_details(/*failed=*/false));
  wait_collective(work, kDetails, *groups_.front());
  return decode_details(all);
}

std::vector<StepDetails> ReducerState::decode_details(const at::Tensor& all) const {
  const at::Tensor fields = all.cpu();
  std::vector<StepDetails> ranks;
  for (int rank = 0; rank < world_size_; ++rank) {
    ranks.push_back(StepDetails::decode(fields.const_data_ptr<int64_t>() + rank * StepDetails::kFields));
  }
  return ranks;
}

/// Of those that are trainable on some rank.
int64_t ReducerState::digest_of_parameters(const std::vector<bool>& trainable) const {
  uint64_t hash = 14695981039346656037ULL;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!trainable[i]) continue;
    const at::Tensor values = parameters_[i].variable.detach().cpu().contiguous();
    hash = extend_digest(hash, values.const_data_ptr(), values.nbytes());
  }
  return static_cast<int64_t>(hash);
}

}  // namespace apex::parallel::detail
