// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <string>
#include <utility>

#include <apex/error.h>

#include "plain_text.h"
#include "transport/host_channel.h"
#include "transport/host_protocol.h"

// Waiting, and detection of peers that have failed.

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kSpin{50};
/// Length of a sleep, after which the peer is checked.
constexpr milliseconds kNap{20};
/// The same, if this thread may have to advance other channels of this process.
constexpr microseconds kShortNap{500};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

/// The ranks that `operation` waits for.
std::vector<int> HostChannel::waited_for(const Operation& operation) const {
  std::vector<int> ranks;
  const auto add_if = [&](auto&& is_late) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && is_late(*controls_[peer])) ranks.push_back(peer);
    }
    return ranks;
  };
  const auto has_not_finished = [](uint64_t number) {
    return [number](const Control& peer) { return peer.finished.load() <= number; };
  };
  if (operation.completed) return ranks;  // by another thread, while this one slept
  // Messages are read in order, so an earlier collective may be the one that blocks.
  for (const auto& before : pending_) {
    if (before->number > operation.number) break;
    if (before->begun) continue;
    if (before->message) return add_if(has_not_finished(before->number - kRing));  // for its slot
    return add_if([&](const Control& peer) { return peer.posted.load() <= before->number; });
  }
  if (operation.kind != HostKind::kSumShares) return add_if(has_not_finished(operation.number));
  const Common::Slot& slot = common_->slots[operation.number % kRing];
  const int shares = shares_of(operation);
  for (int share = 0; share < shares; ++share) {
    const uint8_t claim = slot.claims[share].load();
    const int owner = share / (shares / size_);
    if ((claim & kDone) != 0) continue;
    if (claim != 0) {
      ranks.push_back(claim - 1);
    } else if (owner != rank_ && keeps_part(owner, operation)) {
      ranks.push_back(owner);
    }
  }
  return ranks;
}

bool HostChannel::wait(Lock& lock, const std::function<bool()>& done, const Operation& operation,
                       Clock::time_point until) {
  Clock::time_point looked = Clock::now();
  const Clock::time_point spin_until = looked + (spins_ ? kSpin : microseconds(0));
  for (;;) {
    require_usable();
    // Read the count first: a change after this point increments it.
    const uint32_t seen = common_->event.count();
    advance(/*helps=*/true);
    if (done()) return true;
    const Clock::time_point now = Clock::now();
    if (now >= until) return false;
    if (now < spin_until) {
      for (int i = 0; i < 32; ++i) relax();
      continue;
    }
    check_ends(operation);
    lock.unlock();
    const std::chrono::nanoseconds nap = advance_others(this) ? kShortNap : kNap;
    common_->event.wait(seen, std::min<std::chrono::nanoseconds>(nap, until - now));
    lock.lock();
    if (Clock::now() - looked < kNap) continue;
    check_ends(operation, /*processes=*/true);
    looked = Clock::now();
  }
}

/// The first peer whose process has ended, in words, or "".
std::string HostChannel::ended_process() const {
  for (int peer = 0; peer < size_; ++peer) {
    const auto& process = peers_[peer].process;
    if (peer != rank_ && process && state_of(*process) == ProcessState::kEnded)
      return describe_ended(peer);
  }
  return {};
}

std::string HostChannel::describe_ended(int peer) const {
  return name_of(peer) + " has ended (process " + std::to_string(peers_[peer].process->pid) + ")";
}

std::string HostChannel::name_of(int peer) const {
  const int named = peers_[peer].named;
  return "rank " + std::to_string(named < 0 ? peer : named);
}

/// Fails if a peer that `operation` waits for has ended.
void HostChannel::check_ends(const Operation& operation, bool processes) {
  for (const int peer : waited_for(operation)) {
    std::string end;
    switch (controls_[peer]->end.load()) {
      case End::kNone:
        break;
      case End::kFailed:
        end = name_of(peer) + " reports: " + controls_[peer]->why;
        break;
      case End::kLeft:
        end = name_of(peer) + " has left the group";
        break;
    }
    const auto& process = peers_[peer].process;
    if (end.empty() && processes && process && state_of(*process) == ProcessState::kEnded)
      end = describe_ended(peer);
    if (end.empty()) continue;
    // It may have arrived just before it ended.
    const std::vector<int> still = waited_for(operation);
    if (std::find(still.begin(), still.end(), peer) != still.end()) fail(end);
  }
}

/// Publishes how this rank has ended; peers check it only while they wait for this rank.
void HostChannel::tell_end(End end) noexcept {
  controls_[rank_]->end.store(end);
  common_->event.notify();
}

void HostChannel::fail(const std::string& why) {
  failure_ = why;
  char* const told = controls_[rank_]->why;
  copy_bytes(told, why.data(), character_before(why, sizeof(Control::why) - 1));
  tell_end(End::kFailed);
  throw Error(why);
}

void HostChannel::give_up(const std::string& why) noexcept {
  if (this_pid() != pid_) return;
  const Held held(*this);
  if (!failure_.empty()) return;
  try {
    fail(why);
  } catch (const std::exception&) {
    // fail() has recorded the error.
  }
}

// --- HostWork ---

HostWork::HostWork(std::shared_ptr<HostChannel> channel, std::shared_ptr<HostOperation> operation)
    : SlicedWork(channel->rank_, c10d::OpType::UNKNOWN),
      channel_(std::move(channel)),
      operation_(std::move(operation)),
      timeout_(channel_->timeout_) {}

HostWork::~HostWork() { leave(); }

void HostWork::leave() {
  if (this_pid() != channel_->pid_) return;
  const HostChannel::Held held(*channel_);
  if (channel_->failure_.empty()) channel_->hand_over(*operation_);
}

bool HostWork::isCompleted() {
  if (this_pid() != channel_->pid_) return false;
  const HostChannel::Held held(*channel_);
  if (operation_->completed || !channel_->failure_.empty()) return operation_->completed;
  try {
    channel_->advance();
  } catch (const std::exception&) {
    return false;  // wait() reports the error
  }
  return operation_->completed;
}

bool HostWork::wait_for(milliseconds slice) {
  HostChannel::Held held(*channel_);
  if (operation_->completed) return true;
  const Clock::time_point now = Clock::now();
  if (!deadline_) deadline_ = now + timeout_;
  const auto done = [&] { return operation_->completed; };
  if (channel_->wait(held.lock(), done, *operation_, std::min(now + slice, *deadline_)))
    return operation_->completed;
  if (Clock::now() < *deadline_) return false;
  const std::vector<int> late = channel_->waited_for(*operation_);
  channel_->fail("timed out: waited for " +
                 (late.empty() ? "a processor" : channel_->name_of(late.front())) +
                 " longer than the timeout of " + std::to_string(timeout_.count()) + " ms");
}

void HostWork::within(milliseconds timeout) {
  const HostChannel::Held held(*channel_);
  timeout_ = timeout;
  deadline_ = Clock::now() + timeout;
}

}  // namespace apex::parallel
