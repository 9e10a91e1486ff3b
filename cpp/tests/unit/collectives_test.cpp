// SPDX-License-Identifier: BSD-3-Clause
// Oracle: what the test makes each rank do. Ranks share a store, or are threads over the tests'
// backend. Works complete when the test says so, in calls during a wait, so no test depends on
// time.

#include "comm/collectives.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <support/stored_group.h>
#include <support/thread_backend.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <apex/error.h>

#include "distributed/backends.h"

namespace apex::distributed {

// The library's versions query Gloo and NCCL, which are not compiled into this program.
c10d::Backend& unwrapped(c10d::Backend& backend) { return backend; }

c10::intrusive_ptr<c10d::Backend::Options> gloo_options(c10d::Backend& backend) {
  auto* const silent = dynamic_cast<testing::SilentBackend*>(&backend);
  return silent == nullptr ? nullptr : silent->options;
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest&) { return nullptr; }
c10::intrusive_ptr<c10d::Backend> make_gloo_backend_like(c10d::Backend&,
                                                         const c10::intrusive_ptr<c10d::Store>&,
                                                         int, int) {
  return nullptr;
}

bool is_capturing() { return false; }
bool has_completed(c10d::Work& work) { return work.isCompleted(); }

}  // namespace apex::distributed

namespace apex::parallel {
namespace {

using apex::testing::make_stored_groups;
using apex::testing::run_ranks;
using apex::testing::SilentBackend;
using apex::testing::ThreadBackendControl;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Op = c10d::ReduceOp::RedOpType;

std::chrono::steady_clock::time_point minute_from_now() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(1);
}

/// Completes when the test says so. A wait with a timeout throws at the timeout, as Gloo's does.
/// Fails after a minute, so that a wait which never ends fails the test.
class PendingWork final : public c10d::Work {
 public:
  void end(std::exception_ptr error = nullptr, bool completed = true) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    completed_ = completed;
    error_ = std::move(error);
    wake_.notify_all();
  }
  bool isCompleted() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ended_ || std::chrono::steady_clock::now() >= until_;
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto over = [&] { return ended_; };
    if (timeout == kNoTimeout) {
      wake_.wait_until(lock, until_, over);
    } else if (!wake_.wait_for(lock, timeout, over)) {
      throw std::runtime_error("the end of a slice");
    }
    if (!ended_) throw std::runtime_error("nobody has ended it");
    if (error_) std::rethrow_exception(error_);
    return completed_;
  }

 private:
  const std::chrono::steady_clock::time_point until_ = minute_from_now();
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ended_ = false;
  bool completed_ = true;
  std::exception_ptr error_;
};

c10::intrusive_ptr<PendingWork> pending() { return c10::make_intrusive<PendingWork>(); }

std::exception_ptr cable() { return std::make_exception_ptr(std::runtime_error("cable")); }

/// The message of the CommunicationError that `call` throws.
std::string communication_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no exception";
  return {};
}

void expect_starts_with(const std::string& text, const std::string& start) {
  EXPECT_EQ(text.substr(0, start.size()), start);
}

void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

/// Installs an interruption check for long waits while it lives.
class InterruptionCheck {
 public:
  explicit InterruptionCheck(std::function<bool()> check) {
    set_interruption_check(std::move(check));
  }
  ~InterruptionCheck() { set_interruption_check({}); }
};

TEST(Collectives, CallThrows_ErrorNamesRankOperationCauseAndWhatToDo) {
  const auto groups = make_stored_groups(3, "throws");
  const std::string text = communication_error([&] {
    call_collective("all-reduce of x", *groups[1],
                    []() -> c10::intrusive_ptr<c10d::Work> { throw std::runtime_error("cable"); });
  });
  expect_starts_with(text,
                     "rank 1 of 3: all-reduce of x failed: cable (another rank has probably "
                     "stopped");
  expect_has(text, "; ranks 0, 2 have not reported this failure");
  EXPECT_EQ(text.find("of the job"), std::string::npos);
  EXPECT_TRUE(has_failed(*groups[1]));
}

TEST(Collectives, CauseOfEveryKind_IsToldWithoutABacktrace) {
  const auto group = make_stored_groups(2, "causes")[0];
  const auto text_of = [&](const std::exception_ptr& cause) {
    return communication_error([&] { throw_communication_error("x", *group, cause, "advice"); });
  };
  expect_starts_with(text_of(cable()), "rank 0 of 2: x failed: cable (advice)");
  expect_starts_with(text_of(std::make_exception_ptr(5)),
                     "rank 0 of 2: x failed: unknown error (advice)");
  try {
    TORCH_CHECK(false, "torch's");
  } catch (...) {
    expect_starts_with(text_of(std::current_exception()),
                       "rank 0 of 2: x failed: torch's (advice)");
  }
}

// The hook of each survivor fails because of the third rank.
TEST(Collectives, RankIsSilentWhileHooksFailOnTheOthers_ItAloneIsNamed) {
  const auto gloo = std::make_exception_ptr(
      std::runtime_error("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"));
  for (const std::exception_ptr& error : {gloo, cable()}) {
    const std::string cause = own_cause(error);
    const auto groups = make_stored_groups(3, "hooks" + cause);
    announce_failure(*groups[1], "hook, of backward number 2", cause.empty() ? "" : "another");
    const std::string text = communication_error([&] {
      throw_communication_error("hook, of backward number 3", *groups[0], error, kFixHook);
    });
    expect_has(text, "; rank 2 has not reported this failure");
    EXPECT_EQ(text.find("rank 1"), std::string::npos) << text;
    expect_has(text, cause.empty() ? kLookAtOthers : kFixHook);
  }
}

TEST(CollectiveWait, CompletedWork_ReturnsWithoutAskingAnybody) {
  const auto group = make_stored_groups(2, "completed")[0];
  const auto work = pending();
  work->end();
  wait_collective(work, "x", *group, [] { ADD_FAILURE() << "called"; });
  EXPECT_FALSE(has_failed(*group));
}

TEST(CollectiveWait, WorkThatEndsLate_MeanwhileIsCalled_AndTheWaitGoesOn) {
  const auto group = make_stored_groups(2, "late")[0];
  const auto work = pending();
  int calls = 0;
  wait_collective(work, "x", *group, [&] {
    if (++calls == 3) work->end();
  });
  EXPECT_EQ(calls, 3);
  EXPECT_FALSE(has_failed(*group));
}

TEST(CollectiveWait, WorkThatFailsEarlyOrLate_ThrowsItsErrorNamed) {
  for (const bool late : {false, true}) {
    const auto group = make_stored_groups(2, late ? "fails late" : "fails")[1];
    const auto work = pending();
    if (!late) work->end(cable());
    const std::string text = communication_error(
        [&] { wait_collective(work, "broadcast of y", *group, [&] { work->end(cable()); }); });
    expect_starts_with(text, "rank 1 of 2: broadcast of y failed: cable (");
  }
}

TEST(CollectiveWait, WorkThatWasAborted_Throws) {
  const auto group = make_stored_groups(2, "aborted")[0];
  const auto work = pending();
  work->end(nullptr, /*completed=*/false);
  expect_has(communication_error([&] { wait_collective(work, "x", *group); }),
             "x failed: the collective did not complete (");
}

// A failed rank will not join: a wait for it would last until the timeout.
TEST(CollectiveWait, AnotherRankReportsAFailure_Ends) {
  const auto groups = make_stored_groups(2, "reports");
  begin_call(*groups[0], "x");
  announce_failure(*groups[1], "x");
  const std::string text =
      communication_error([&] { wait_collective(pending(), "x", *groups[0]); });
  expect_starts_with(
      text,
      "rank 0 of 2: x failed: another rank reports that a collective of this group has failed (");
}

// A failure fails the group and the groups made from it, on whichever of them it was found.
TEST(CollectiveWait, GroupMadeFromAnother_FailsWithIt) {
  for (const bool own : {false, true}) {
    const auto parents = make_stored_groups(2, own ? "parent, own" : "parent");
    const auto made = make_stored_groups(2, "made");
    for (size_t rank = 0; rank < 2; ++rank) watch_with(*made[rank], *parents[rank], "made");
    announce_failure(own ? *made[1] : *parents[1], "x");
    EXPECT_TRUE(has_failed(*parents[1]));
    EXPECT_TRUE(has_failed(*made[1]));
    expect_has(
        communication_error([&] { wait_collective(pending(), "x", own ? *parents[0] : *made[0]); }),
        "another rank reports");
  }
}

TEST(CollectiveWait, MeanwhileFindsAMismatch_PassesAsItIs) {
  const auto group = make_stored_groups(2, "mismatch")[0];
  try {
    wait_collective(pending(), "x", *group, [] { throw RankMismatch("as it is"); });
    ADD_FAILURE() << "no exception";
  } catch (const RankMismatch& error) {
    EXPECT_EQ(std::string(error.what()), "as it is");
  }
}

// The other rank has found the mismatch, and has left the group.
TEST(CollectiveWait, WorkFailsAndMeanwhileKnowsTheMismatch_ThatIsTheError) {
  const auto group = make_stored_groups(2, "known")[0];
  const auto work = pending();
  work->end(cable());
  EXPECT_THROW(
      wait_collective(work, "x", *group, [] { throw RankMismatch("the ranks are out of step"); }),
      RankMismatch);
}

// The check's exception (KeyboardInterrupt) goes to the caller; other ranks must not wait for this
// rank.
TEST(CollectiveWait, Interrupted_EndsByThatError_AndTheOthersHearOfIt) {
  struct OfTheCaller {};
  for (const bool throws : {false, true}) {
    for (const bool future : {false, true}) {
      const auto groups = make_stored_groups(
          2, std::string("interrupted ") + (throws ? "throws" : "") + (future ? "future" : ""));
      for (const Group& group : groups) begin_call(*group, "x");
      const auto wait = [&] {
        if (future) {
          wait_future(*c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get()), "x",
                      *groups[0]);
        } else {
          wait_collective(pending(), "x", *groups[0]);
        }
      };
      {
        const InterruptionCheck check([&]() -> bool {
          if (throws) throw OfTheCaller();
          return true;
        });
        if (throws) {
          EXPECT_THROW(wait(), OfTheCaller);
        } else {
          EXPECT_THROW(wait(), Interrupted);
        }
      }
      expect_has(communication_error([&] { wait_collective(pending(), "x", *groups[1]); }),
                 "another rank reports");
    }
  }
}

/// A Work that waits on a stream: no other query is allowed during graph capture.
class StreamWork final : public c10d::Work {
 public:
  bool isCompleted() override {
    ADD_FAILURE() << "asked";
    return false;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    EXPECT_EQ(timeout, kNoTimeout);
    ++waits;
    return true;
  }
  int waits = 0;
};

TEST(CollectiveWait, BackendOtherThanGloo_WaitsAsThatDoes) {
  run_ranks(2, [](int, const Group& group) {
    const auto work = c10::make_intrusive<StreamWork>();
    wait_collective(work, "x", *group);
    EXPECT_EQ(work->waits, 1);
  });
}

TEST(CollectiveFuture, CompletedOrLate_Returns) {
  for (const bool late : {false, true}) {
    const auto group = make_stored_groups(2, late ? "future late" : "future")[0];
    const auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    if (!late) future->markCompleted();
    int asked = 0;
    const InterruptionCheck check([&] {
      if (++asked == 2) future->markCompleted();
      return false;
    });
    wait_future(*future, "x", *group);
    EXPECT_EQ(asked, late ? 2 : 0);
    EXPECT_FALSE(has_failed(*group));
  }
}

// The hook's reduction fails the group.
TEST(CollectiveFuture, ErrorInTheFuture_Returns_FailureOfAnotherRank_Throws) {
  const auto group = make_stored_groups(2, "future's")[0];
  const auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
  future->setError(cable());
  wait_future(*future, "hook", *group);
  EXPECT_FALSE(has_failed(*group));

  const auto groups = make_stored_groups(2, "future of others");
  for (const Group& one : groups) begin_call(*one, "hook");
  announce_failure(*groups[1], "hook");
  const auto never = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
  const InterruptionCheck a_minute_at_most([&, until = minute_from_now()] {
    if (std::chrono::steady_clock::now() >= until && !never->completed()) never->setError(cable());
    return false;
  });
  const std::string others = communication_error([&] { wait_future(*never, "hook", *groups[0]); });
  expect_starts_with(others, "rank 0 of 2: hook failed: another rank reports");
  expect_has(others, kLookAtOthers);
}

TEST(CollectiveIssue, OnEitherStream_ComputesTheSame_AndOnTheCurrentOneIsNotAsync) {
  for (const Enqueue on : {Enqueue::kOnOwnStream, Enqueue::kOnCurrentStream}) {
    const auto control = ThreadBackendControl::create(3);
    run_ranks(control, [&](int rank, const Group& group) {
      const auto run = [&](const c10::intrusive_ptr<c10d::Work>& work) {
        wait_collective(work, "x", *group);
      };
      const at::Tensor sum = at::full({4}, rank + 1.0), most = sum.clone();
      run(issue_all_reduce("x", *group, sum, Op::SUM, on));
      run(issue_all_reduce("x", *group, most, Op::MAX, on));
      EXPECT_TRUE(sum.equal(at::full({4}, 6.0)));
      EXPECT_TRUE(most.equal(at::full({4}, 3.0)));
      const at::Tensor gathered = at::zeros({6});
      run(issue_all_gather("x", *group, gathered, at::full({2}, rank + 1.0), on));
      EXPECT_TRUE(gathered.equal(at::tensor({1., 1., 2., 2., 3., 3.}, at::kFloat)));
      const at::Tensor root = at::full({3}, rank + 1.0);
      run(issue_broadcast("x", *group, root, 2));
      EXPECT_TRUE(root.equal(at::full({3}, 3.0)));
      const auto log = control->log(rank);
      ASSERT_EQ(log.size(), 4u);
      EXPECT_EQ(log[0].reduce_op, Op::SUM);
      EXPECT_EQ(log[1].reduce_op, Op::MAX);
      EXPECT_EQ(log[3].root, 2);
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(log[i].async_op, on == Enqueue::kOnOwnStream) << i;
    });
  }
}

TEST(CollectiveIssue, EveryCollectiveThatCannotBeIssued_ThrowsNamed) {
  const at::Tensor tensor = at::zeros({2}).expand({2, 2});  // ranks do not meet for it
  const std::vector<std::function<void(c10d::ProcessGroup&)>> calls{
      [&](auto& group) { issue_all_reduce("it", group, tensor); },
      [&](auto& group) { issue_broadcast("it", group, tensor, 0); },
      [&](auto& group) { issue_all_gather("it", group, at::zeros({4, 2}), tensor); },
      [&](auto& group) { issue_all_to_all("it", group, tensor, tensor); },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto group = make_stored_groups(2, "unsupported " + std::to_string(i))[0];
    expect_starts_with(communication_error([&] { calls[i](*group); }), "rank 0 of 2: it failed: ");
  }
}

/// Stands in for Gloo: records calls, and completes them without doing anything.
class RecordingBackend final : public SilentBackend {
 public:
  using SilentBackend::SilentBackend;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&,
                                           const c10d::AllreduceOptions&) override {
    return note("allreduce");
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&,
                                           const c10d::BroadcastOptions&) override {
    return note("broadcast");
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor&,
                                                 const c10d::AllgatherOptions&) override {
    output.zero_();  // as from ranks without a process name
    return note("allgather");
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>& to,
                                               std::vector<int64_t>& from,
                                               const c10d::AllToAllOptions&) override {
    received = to;
    sent = from;
    return note("alltoall");
  }
  std::vector<std::string> calls;
  std::vector<int64_t> received, sent;

 private:
  c10::intrusive_ptr<c10d::Work> note(const std::string& call) {
    calls.push_back(call);
    const auto work = pending();
    work->end();
    return work;
  }
};

struct RecordedGroup {
  c10::intrusive_ptr<RecordingBackend> backend = c10::make_intrusive<RecordingBackend>(0, 2);
  Group group =
      c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);

  explicit RecordedGroup(const std::string& name) {
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                      c10::intrusive_ptr<c10d::Backend>(backend));
    group->setGroupName(name);
  }
};

// Ranks create a channel together; a rank that tries it alone waits indefinitely.
TEST(CollectiveIssue, NotContiguous_DoesNotMeetForAChannel) {
  using Calls = std::vector<std::string>;
  const at::Tensor tensor = at::zeros({4, 4});
  RecordedGroup direct("direct");
  issue_all_reduce("x", *direct.group, tensor.t());
  EXPECT_EQ(direct.backend->calls, (Calls{"allreduce"}));

  RecordedGroup met("met");
  issue_all_reduce("x", *met.group, tensor);
  ASSERT_GE(met.backend->calls.size(), 2u);
  EXPECT_EQ(met.backend->calls.front(), "allgather");  // which ranks are on this host?
  EXPECT_EQ(met.backend->calls.back(), "allreduce");   // none has a process name
  met.backend->calls.clear();
  issue_all_reduce("x", *met.group, tensor);
  issue_broadcast("x", *met.group, tensor, 0);
  issue_all_gather("x", *met.group, at::zeros({8, 4}), tensor);
  issue_all_to_all("x", *met.group, tensor, tensor);
  EXPECT_EQ(met.backend->calls, (Calls{"allreduce", "broadcast", "allgather", "alltoall"}));
}

TEST(CollectiveIssue, AllToAll_NumbersOfElementsAreThoseGiven) {
  RecordedGroup group("all to all");
  issue_all_to_all("x", *group.group, at::zeros({5}), at::zeros({3}), {1, 4}, {3, 0});
  EXPECT_EQ(group.backend->received, (std::vector<int64_t>{1, 4}));
  EXPECT_EQ(group.backend->sent, (std::vector<int64_t>{3, 0}));
}

TEST(Collectives, TensorWithoutMemory_Issued_ThrowsBeforeAnythingIsSent) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    for (const at::Tensor& tensor :
         {at::empty({3}, at::TensorOptions(at::kMeta)), at::_efficientzerotensor({3}, at::kFloat),
          at::zeros({3}).to_sparse()}) {
      EXPECT_THROW(issue_all_reduce("sum", *group, tensor), InvalidArgument);
      EXPECT_THROW(issue_broadcast("broadcast", *group, tensor, 0), InvalidArgument);
      EXPECT_THROW(issue_all_gather("gather", *group, at::zeros({6}), tensor), InvalidArgument);
    }
    EXPECT_TRUE(control->log(rank).empty());
  });
}

}  // namespace
}  // namespace apex::parallel
