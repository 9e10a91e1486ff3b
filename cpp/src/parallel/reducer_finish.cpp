#include <algorithm>
#include <cmath>
#include <exception>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "parallel/reducer_state.h"
#include "parallel/sparse_all_reduce.h"

namespace apex::parallel::detail {

namespace {

/// What a communication hook's future yields: a tensor, or a list of one.
at::Tensor tensor_of(const c10::IValue& value) {
  return value.isTensorList() ? value.toTensorVector().at(0) : value.toTensor();
}

/// Gradients, and a buffer that was made in a hook, belong to the streams that made them; the one that ends
/// backward reads and writes them, and until it is done their memory must not serve those streams again.
/// Who made them is not known in a backward that learns.
void keep_for_current_stream(const Bucket& bucket, const std::vector<c10::Stream>& producers) {
  if (bucket.device().is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(bucket.device().type());
  const c10::Stream current = guard.getStream(bucket.device());
  const auto is_current = [&](const c10::Stream& producer) { return producer == current; };
  if (!producers.empty() && std::all_of(producers.begin(), producers.end(), is_current)) return;
  const auto keep = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.layout() == at::kStrided) tensor.record_stream(current);
  };
  keep(bucket.message());
  keep(bucket.gradients_buffer());
  for (const Bucket::Slot& slot : bucket.slots()) keep(slot.variable.grad());
}

}  // namespace

/// Waits for the message of a bucket; the bucket's device is current.
void ReducerState::receive(Entry& entry, const std::string& what, const GroupPtr& group) {
  if (entry.future) {
    wait_future(*entry.future, what, *group);
    const c10::IValue value = entry.future->value();
    entry.bucket.assign(tensor_of(value));
    entry.future.reset();
    entry.hooked = {};
  } else if (entry.work) {
    await_work(entry.work, what, group);
    entry.work.reset();
  } else if (entry.bucket.kind() == Bucket::Kind::kSparse) {
    // Its size is not known before every rank has told its own, which the host waits for: so it is
    // exchanged here, when all others are on their way.
    entry.bucket.assign_sparse(sparse_all_reduce(entry.bucket.message(), group));
  }
}

/// And hands out its gradients.
void ReducerState::unpack(Entry& entry) {
  keep_for_current_stream(entry.bucket, entry.producers);
  entry.bucket.unpack(scale_after(entry), kept_);
}

void ReducerState::await(size_t index) {
  Entry& entry = entries_[index];
  const c10::OptionalDeviceGuard guard(entry.bucket.device());
  if (overlap_) {
    if (entry.bucket.kind() == Bucket::Kind::kSparse) time_launch(index);  // it is sent only now
    overlap_->awaiting(index);
  }
  receive(entry, describe_bucket(index), group_of(index));
  if (overlap_) overlap_->arrived(index);
  unpack(entry);
}

void ReducerState::run_second_phases() {
  if (!comm_hook_) return;
  for (size_t b = 0; b < entries_.size(); ++b) {
    Entry& entry = entries_[b];
    if (!entry.future || !comm_hook_->has_finish(entry.hooked)) continue;
    const c10::OptionalDeviceGuard guard(entry.bucket.device());
    wait_future(*entry.future, describe_bucket(b), *group_of(b));
    entry.future = comm_hook_->finish(entry.hooked, tensor_of(entry.future->value()));
    if (overlap_) overlap_->in_flight(b, entry.future);
  }
}

/// Calls the bucket callback. What it throws is thrown when the other ranks have been served.
void ReducerState::call_back(int64_t index, const std::vector<Bucket::Slot>& slots, bool all_used) {
  if (!callback_ || callback_error_) return;
  ReducedBucket bucket;
  bucket.index = index;
  for (const Bucket::Slot& slot : slots) {
    if (all_used || used_by_any_[slot.parameter]) bucket.parameters.push_back(slot.parameter);
  }
  if (bucket.parameters.empty()) return;
  try {
    callback_(bucket);
  } catch (...) {
    callback_error_ = std::current_exception();
  }
}

void ReducerState::complete_bucket(size_t index) {
  await(index);
  entries_[index].completed = true;
  call_back(static_cast<int64_t>(index), entries_[index].bucket.slots(), true);
}

/// Awaits and unpacks all buckets, and calls back for those of which this rank used every parameter. Returns the
/// others.
std::vector<ReducerState::Unsettled> ReducerState::await_buckets() {
  std::vector<Unsettled> unsettled;
  for (size_t b = 0; b < entries_.size(); ++b) {
    if (entries_[b].completed) continue;  // while the rest was deferred
    await(b);
    if (!callback_ || b >= plan_.buckets.size()) continue;
    const auto index = static_cast<int64_t>(b);
    if (entries_[b].bucket.has_unused()) {
      unsettled.push_back({index, entries_[b].bucket.slots()});
    } else {
      call_back(index, entries_[b].bucket.slots(), true);
    }
  }
  return unsettled;
}

std::string ReducerState::find_non_finite() {
  int64_t first = -1;
  for (Entry& entry : entries_) {
    if (!entry.largest.defined()) continue;
    const at::Tensor largest = entry.largest.cpu();
    entry.largest = at::Tensor();
    const double* values = largest.const_data_ptr<double>();
    const auto& slots = entry.bucket.slots();
    for (size_t i = 0; i < slots.size(); ++i) {
      if (std::isfinite(values[i])) continue;
      if (first < 0 || slots[i].parameter < first) first = slots[i].parameter;
    }
  }
  std::vector<int64_t> found{first};
  if (world_size_ > 1) {
    const GroupPtr& group = groups_.front();
    const at::Device device = control_device(group, parameters_.front().variable.device());
    at::Tensor mine = at::full({1}, first, at::TensorOptions(at::kLong).device(device));
    at::Tensor all = at::empty({world_size_}, mine.options());
    const std::string what = "exchange of non-finite gradients";
    wait_collective(all_gather_flat(what, *group, all, mine), what, *group);
    all = all.cpu();
    const int64_t* ranks = all.const_data_ptr<int64_t>();
    found.assign(ranks, ranks + world_size_);
  }
  std::string text;
  int64_t ranks = 0;
  for (size_t rank = 0; rank < found.size(); ++rank) {
    if (found[rank] < 0) continue;
    if (ranks++ == 0) {
      text = "rank " + std::to_string(rank) + " contributed a gradient that is infinite or NaN for "
             "parameter '" + parameters_[found[rank]].name + "'";
    }
  }
  if (text.empty()) return text;
  return text + " (" + std::to_string(ranks) + " of " + std::to_string(found.size()) +
         " ranks have such gradients), and so it is on every rank now: look at that rank's batch and "
         "loss, lower the learning rate, or scale the loss; do not step the optimizer";
}

void ReducerState::remember_reduced() {
  if (options_.gradient_average && !joining_) return;
  for (Parameter& parameter : parameters_) {
    const at::Tensor& grad = parameter.variable.grad();
    if (!grad.defined() || parameter.bucket < 0) continue;
    parameter.reduced = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
        grad.getIntrusivePtr());
    parameter.reduced_version = grad._version();
  }
}

void ReducerState::settle_usage() {
  const bool missed = std::any_of(entries_.begin(), entries_.end(),
                                  [](const Entry& entry) { return entry.bucket.has_unused(); });
  if (!missed && !watches_unplanned_) return;
  std::vector<uint8_t>& used_by_any = used_by_any_;
  used_by_any = used_;
  for (size_t b = 0; b < entries_.size(); ++b) {
    const bool last = b + 1 == entries_.size();
    if (entries_[b].bucket.reported().empty() || !(missed || last)) continue;
    entries_[b].bucket.reported_usage(used_by_any);
    ++statistics_.usage_reads;
  }
  for (Entry& entry : entries_) entry.bucket.settle(used_by_any);
  if (!watches_unplanned_) return;
  std::vector<int64_t> late;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // One that was unfrozen since is not reported; the other ranks will hear of it in relearn_now().
    const bool reported = parameters_[i].bucket < 0 && parameters_[i].trainable_anywhere;
    if (reported && used_by_any[i]) late.push_back(static_cast<int64_t>(i));
  }
  if (late.empty()) return;
  // Every rank has read the same numbers, so every rank comes here with the same list, and extends its
  // plan alike.
  reduce_apart(late);
  extend_plan(late);
}

/// Reduces gradients that are in no bucket of this backward. The same list on every rank.
void ReducerState::reduce_apart(const std::vector<int64_t>& late) {
  const GroupPtr& group = groups_.front();
  const std::string what = "all-reduce of late gradients";
  std::vector<Entry> round;
  for (const auto& members : assign_buckets(parameter_infos(), late, options_.limits).buckets) {
    round.emplace_back(make_bucket(members, {}, /*may_be_in_place=*/true));
    round.back().bypasses_hook = true;
  }
  for (Entry& entry : round) {
    const c10::OptionalDeviceGuard guard(entry.bucket.device());
    entry.bucket.pack(used_, scale_before(entry));
    if (entry.bucket.kind() == Bucket::Kind::kSparse) continue;  // exchanged in await()
    if (world_size_ == 1) continue;                              // as in launch()
    std::vector<at::Tensor> message{entry.bucket.message()};
    entry.work = call_collective(what, *group, [&] { return group->allreduce(message); });
  }
  std::vector<uint8_t> used_by_any(parameters_.size(), 1);
  for (Entry& entry : round) {
    const c10::OptionalDeviceGuard guard(entry.bucket.device());
    receive(entry, what, group);
    unpack(entry);
    entry.bucket.settle(used_by_any);
    call_back(-1, entry.bucket.slots(), true);
  }
}

void ReducerState::extend_plan(const std::vector<int64_t>& late) {
  const BucketPlan more = assign_buckets(parameter_infos(), late, options_.limits);
  plan_.buckets.insert(plan_.buckets.end(), more.buckets.begin(), more.buckets.end());
  build_buckets();
  tuner_.reset(parameters_.size());
  backwards_with_plan_ = 0;
  preset_in_force_ = false;
  ++statistics_.plans_extended;
}

void ReducerState::relearn_now() {
  std::vector<bool> reduced;
  for (const Parameter& parameter : parameters_) reduced.push_back(parameter.bucket >= 0);
  learn();
  std::vector<int64_t> late;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // A kept plan may hold parameters that no rank has used in this backward.
    if (parameters_[i].bucket >= 0 && !reduced[i] && used_by_any_[i]) late.push_back(static_cast<int64_t>(i));
  }
  reduce_apart(late);
}

void ReducerState::reset(Entry& entry) {
  entry.pending = entry.members;
  entry.launched = entry.completed = false;
  entry.producers.clear();
  entry.largest = entry.absent = at::Tensor();
}

void ReducerState::reset_counters() {
  for (Entry& entry : entries_) reset(entry);
  for (Parameter& parameter : parameters_) parameter.overtaken = false;
  next_launch_ = 0;
  clock_ = 0;
  scope_ = nullptr;
  in_flight_ = false;
  steps_.backward_ended();
}

void ReducerState::finish(BackwardScope* scope) {
  const Lock lock(mutex_);
  if (scope_ != scope) return;
  const ProfilerRange range("apex::reducer::finish_backward");
  const size_t arrived = arrived_in_order();
  const bool learnt_now = learning_;
  or_drop_messages([&] {
    if (!carried_.empty()) carry_left_plan();
    if (learning_) learn();
    while (next_launch_ < entries_.size()) {
      if (waits_for_chain(next_launch_)) {
        const size_t before = next_launch_ - 1;
        wait_future(*entries_[before].future, describe_bucket(before), *group_of(before));
      }
      launch(next_launch_);
      ++statistics_.launched_at_end;
    }
  });
  ++backwards_with_plan_;
  if (may_defer()) {
    scope_ = nullptr;
    in_flight_ = true;
    ++statistics_.deferred;
    if (overlap_) overlap_->ended();
    return;
  }
  complete(learnt_now);
  or_drop_messages([&] { send_first_needed_first(arrived); });
}

void ReducerState::or_drop_messages(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommunicationError&) {
    broken_ = true;
    drop_messages();
    throw;
  } catch (...) {
    send_failure();
    drop_messages();
    throw;
  }
}

void ReducerState::complete(bool learnt_now) {
  std::string non_finite;
  or_drop_messages([&] {
    // A rank that failed takes part in no further exchange, so its failure has to be known before the first. A
    // bucket callback, however, is to be called as soon as its bucket is there.
    const bool exchanges_first =
        options_.check_finite || comm_hook_ ||
        std::any_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
          return entry.bucket.kind() == Bucket::Kind::kSparse;
        });
    if (!callback_ || exchanges_first) refuse_failed_step(await_facts(entries_));
    run_second_phases();
    if (options_.check_finite && !parameters_.empty()) non_finite = find_non_finite();
    const std::vector<Unsettled> unsettled = await_buckets();
    const SeenFacts seen = await_facts(entries_);
    refuse_failed_step(seen);
    settle_usage();
    for (const Unsettled& bucket : unsettled) call_back(bucket.index, bucket.slots, false);
    if (overlap_) overlap_->completed();
    compare_steps(seen, trainable_anywhere());
    if (seen.rebuild_wanted()) {
      relearn_now();
    } else if (!learnt_now && !(defers_ && tuner_.phase() == BucketTuner::Phase::kKeep)) {
      tune();
    }
  });
  for (Parameter& parameter : parameters_) parameter.touched = false;
  remember_reduced();
  reset_counters();
  if (set_in_force_) recurrence_.came(*set_in_force_);
  ++statistics_.backwards;
  if (plan_for_once_) forget_plan();
  const std::exception_ptr thrown = std::exchange(callback_error_, nullptr);
  if (!out_of_step_.empty()) {
    deferred_error_.clear();
    tell_companions();
    throw RankMismatch(std::exchange(out_of_step_, {}));
  }
  if (!deferred_error_.empty()) throw Error(std::exchange(deferred_error_, {}));
  if (!non_finite.empty()) throw NonFiniteGradient(non_finite);
  if (thrown) std::rethrow_exception(thrown);
}

void ReducerState::drop_messages() noexcept {
  for (Entry& entry : entries_) {
    entry.work.reset();
    entry.future.reset();
    entry.hooked = {};
    entry.bucket.abandon();
  }
  deferred_error_.clear();
  out_of_step_.clear();
  callback_error_ = nullptr;
  if (overlap_) overlap_->drop();
  reset_counters();
}

void ReducerState::abandon(BackwardScope* scope) noexcept {
  const Lock lock(mutex_);
  if (scope_ != scope) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // Whatever accumulated is still local, or half way: the next synchronized backward takes it along.
    if (!used_[i]) continue;
    parameters_[i].touched = true;
    parameters_[i].touched_version = parameters_[i].variable._version();
  }
  if (!learning_ && carried_.empty() && carries_facts() && next_launch_ == entries_.size() && !broken_) {
    follow_the_others();
  } else {
    send_failure();
  }
  drop_messages();
}

}  // namespace apex::parallel::detail
