// SPDX-License-Identifier: BSD-3-Clause
#include "comm/hook_failure.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <thread>

#include "comm/bounded_call.h"
#include "comm/failure_report.h"
#include "comm/host_channel.h"
#include "distributed/backends.h"
#include "interruption.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kBetweenLooks{20};

/// One group of the reducer, and from where on ranks have to hear of the failure: twice the number
/// of a call, plus one for its hook.
struct Reach {
  GroupRecordPtr record;
  StorePtr store;
  int64_t position = 0;
};

/// A failure in the store: "POSITION WHAT\nWHEN CAUSE". Ranks compare the first line only: the same
/// error comes before the collective on a rank whose future is complete at once, and after it on
/// another.
constexpr const char* kBefore = "before ";
constexpr const char* kAfter = "after ";

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

enum class Answer { kNone, kAlike, kApart };

/// Tells of the failure, and asks until there is an answer.
void tell_and_ask(const std::vector<Reach>& reaches, const std::string& what,
                  const std::string& cause, const std::atomic<bool>& stop,
                  std::atomic<Answer>& answer) {
  std::vector<StorePtr> stores;
  for (const Reach& reach : reaches) {
    stores.push_back(own_connection(reach.store));
    const GroupRecord& record = *reach.record;
    record.hook_board().post(*stores.back(), record.rank,
                             std::to_string(reach.position) + ' ' + what + '\n' + cause);
  }
  const GroupRecord& record = *reaches.front().record;
  const NoticeBoard board = record.hook_board();
  const std::string mine = std::to_string(reaches.front().position) + ' ' + what;
  for (int64_t read = 0; !stop;) {
    for (size_t i = 0; i < reaches.size(); ++i) {
      if (stores[i]->add(reaches[i].record->count_key(), 0) > 0) answer = Answer::kApart;
    }
    const int64_t posts = board.posts(*stores.front());
    if (posts != read) {
      read = posts;
      const std::map<int, std::string> failures = board.read(*stores.front());
      for (const auto& [rank, failure] : failures) {
        if (first_line(failure) != mine) answer = Answer::kApart;
      }
      if (answer != Answer::kApart && static_cast<int>(failures.size()) == record.size)
        answer = Answer::kAlike;
    }
    if (answer != Answer::kNone) return;
    std::this_thread::sleep_for(record.between_looks());
  }
}

Answer ask(const std::vector<Reach>& reaches, const std::string& what, const std::string& cause,
           Clock::time_point until) {
  const auto answer = std::make_shared<std::atomic<Answer>>(Answer::kNone);
  BoundedCall talk(
      [=](const std::atomic<bool>& stop) { tell_and_ask(reaches, what, cause, stop, *answer); });
  while (!talk.wait_until(Clock::now() + kBetweenLooks)) {
    if (Clock::now() >= until || is_interrupted() ||
        !look_around(*reaches.front().record, ProcessState::kEnded).empty())
      break;
    advance_host_channels();  // others may need this rank to get here
  }
  return *answer;
}

}  // namespace

bool hooks_failed_alike(const std::vector<GroupPtr>& groups, const GroupPtr& group,
                        const std::string& what, const std::string& cause, bool begun) {
  std::vector<Reach> reaches;
  for (const GroupPtr& one : groups) {
    Reach reach;
    reach.record = record_of(*one);
    reach.store = reach.record ? reach.record->store.lock() : nullptr;
    if (!reach.store) return false;
    reach.position = 2 * reach.record->calls.last_number() + (one == group ? 0 : 1);
    reaches.push_back(std::move(reach));
  }
  const auto timeout = distributed::gloo_timeout(*group->getBackend(at::kCPU));
  Answer answer = Answer::kNone;
  const auto give_up = [&] {
    for (const GroupPtr& one : groups) announce_failure(*one, what);
  };
  try {
    // A hook whose collective has failed has waited for the timeout already, as a rank may be lost:
    // if its error is every rank's own, the others are not far.
    const milliseconds patience = begun ? patience_of(*group) : timeout.value_or(milliseconds(0));
    answer = ask(reaches, what, (begun ? kAfter : kBefore) + cause, Clock::now() + patience);
  } catch (...) {  // the interruption check's own
    give_up();
    throw;
  }
  if (answer != Answer::kAlike) {
    give_up();
    return false;
  }
  for (const Reach& reach : reaches) ++reach.record->hooks_failed;
  return true;
}

std::string failed_hook(c10d::Store& store, const GroupRecord& record, int64_t call,
                        Waiting waiting) {
  const std::map<int, std::string> failures = record.hook_board().read(store);
  const int64_t position = 2 * call + (waiting == Waiting::kForHook ? 1 : 0);
  std::string first;
  int64_t earliest = position;
  for (const auto& [rank, failure] : failures) {
    const int64_t failed_at = std::atoll(failure.c_str());
    if (failed_at >= earliest) continue;
    const size_t space = failure.find(' ');
    const size_t line = failure.find('\n');
    // Once its collective has begun, a hook may have failed because another rank is lost.
    if (failure.compare(line + 1, std::string(kBefore).size(), kBefore) != 0) continue;
    earliest = failed_at;
    first = "rank " + std::to_string(rank) + " reports that " +
            failure.substr(space + 1, line - space - 1) +
            " failed there: " + failure.substr(line + 1 + std::string(kBefore).size());
  }
  return first;
}

}  // namespace apex::parallel
