// SPDX-License-Identifier: BSD-3-Clause
#include <support/thread_backend_control.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

namespace apex::testing {
namespace {

std::exception_ptr make_error(const std::string& message) {
  return std::make_exception_ptr(std::runtime_error(message));
}

/// The limit of a wait().
constexpr std::chrono::milliseconds kTimeout = std::chrono::seconds(20);

}  // namespace

/// One rank's handle on a collective. The control's worker thread completes it and runs the
/// callbacks of its future, which must not wait for another collective of the same control.
class ThreadWork final : public c10d::Work {
 public:
  ThreadWork(int rank, c10d::OpType type, uint64_t seq, std::vector<at::Tensor> results,
             std::weak_ptr<ThreadBackendControl> control)
      : c10d::Work(rank, type),
        seq_(seq),
        results_(std::move(results)),
        control_(std::move(control)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  /// Blocks until completion. Throws the collective's error, or, after `timeout` (0: kTimeout), an
  /// error that names the ranks that have not arrived.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const auto limit = timeout == kNoTimeout ? kTimeout : timeout;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!cv_.wait_for(lock, limit, [&] { return completed_; })) {
      lock.unlock();
      const auto control = control_.lock();
      throw std::runtime_error(
          "rank " + std::to_string(rank_) + ": collective " + std::to_string(seq_) +
          " did not complete within " + std::to_string(limit.count()) +
          " ms: " + (control ? control->describe_pending(seq_) : "its process group is gone"));
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }
  void synchronize() override {}
  void abort() override {
    complete(make_error("collective " + std::to_string(seq_) + " was aborted"));
  }
  std::vector<at::Tensor> result() override { return results_; }
  /// Completes with the list of output tensors, or with the error.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  /// Called once; later calls do nothing.
  void complete(std::exception_ptr error) {
    if (claimed_.exchange(true)) return;
    // Complete the future first, as Gloo does: callbacks have run when wait() returns.
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
    finish(error);
  }

 private:
  const uint64_t seq_;
  const std::vector<at::Tensor> results_;
  const std::weak_ptr<ThreadBackendControl> control_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> claimed_{false};
};

struct Collective {
  explicit Collective(int world) : contributions(world), works(world) {}
  std::vector<Contribution> contributions;
  std::vector<c10::intrusive_ptr<ThreadWork>> works;  // null: not arrived yet
  int arrived = 0;
  bool scheduled = false;
  bool finished = false;
  std::optional<std::string> error;
};

namespace {

/// Checks that the tensors are as real backends take them, and completes the record.
void prepare(Contribution& contribution) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  CollectiveRecord& record = contribution.record;
  for (const auto* side : {&contribution.inputs, &contribution.outputs}) {
    for (const at::Tensor& tensor : *side) {
      TORCH_CHECK(tensor.defined() && tensor.device().is_cpu(),
                  "the thread backend takes CPU tensors only");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(),
                  "the thread backend takes dense tensors only, like NCCL; got sizes ",
                  tensor.sizes(), " and strides ", tensor.strides());
    }
  }
  for (const at::Tensor& input : contribution.inputs) {
    contribution.snapshots.push_back(
        input.as_strided({input.numel()}, {1}, input.storage_offset()).clone());
    record.numel += input.numel();
  }
  const at::Tensor& first = contribution.inputs.at(0);
  record.dtype = first.scalar_type();
  record.data_ptr = first.const_data_ptr();
  record.sizes = first.sizes().vec();
}

/// Why two ranks cannot be in the same collective; nullopt if they can.
std::optional<std::string> find_mismatch(int rank_a, const CollectiveRecord& a, int rank_b,
                                         const CollectiveRecord& b) {
  // In an all-to-all, lengths differ per pair of ranks; run_collective() compares them.
  if (a.op == b.op && a.reduce_op == b.reduce_op && a.root == b.root && a.dtype == b.dtype &&
      (a.sizes == b.sizes || a.op == "alltoall_base")) {
    return std::nullopt;
  }
  return "collective " + std::to_string(a.seq) + " differs between ranks: rank " +
         std::to_string(rank_a) + " issued " + a.describe() + ", rank " + std::to_string(rank_b) +
         " issued " + b.describe() +
         "; the ranks do not launch the same collectives in the same order";
}

}  // namespace

struct ThreadBackendControl::State {
  explicit State(int world) : world_size(world), logs(world), left(world) {}

  const int world_size;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<CollectiveRecord>> logs;
  std::vector<bool> left;
  std::map<uint64_t, std::shared_ptr<Collective>> collectives;
  std::map<uint64_t, std::string> failures;
  std::map<std::pair<uint64_t, int>, std::string> issue_failures;
  std::optional<std::string> aborted;
  std::deque<uint64_t> ready;
  bool stop = false;

  // The functions below require the mutex.

  std::shared_ptr<Collective> get(uint64_t seq) {
    auto& slot = collectives[seq];
    if (!slot) {
      slot = std::make_shared<Collective>(world_size);
    }
    return slot;
  }

  // Schedules the collective if it has failed, or if all ranks have arrived.
  void schedule(uint64_t seq) {
    const auto found = collectives.find(seq);
    if (found == collectives.end()) {
      return;
    }
    Collective& collective = *found->second;
    if (collective.error) {
      ready.push_back(seq);  // again for ranks that arrive late
    } else if (!collective.scheduled && collective.arrived == world_size) {
      collective.scheduled = true;
      ready.push_back(seq);
    }
    changed.notify_all();
  }

  void fail_collective(uint64_t seq, const std::string& message) {
    const auto collective = get(seq);
    if (!collective->scheduled && !collective->error) {
      collective->error = message;
    }
    schedule(seq);
  }

  void fail_if_incomplete(uint64_t seq) {
    for (int rank = 0; rank < world_size; ++rank) {
      if (left[rank] && logs[rank].size() <= seq) {
        fail_collective(seq, "collective " + std::to_string(seq) + " can not complete: rank " +
                                 std::to_string(rank) + " ended after " +
                                 std::to_string(logs[rank].size()) + " collectives");
      }
    }
  }

  static void run_worker(const std::shared_ptr<State>& state);
};

void ThreadBackendControl::State::run_worker(const std::shared_ptr<State>& state) {
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return state->stop || !state->ready.empty(); });
    if (state->ready.empty()) {
      return;
    }
    const uint64_t seq = state->ready.front();
    state->ready.pop_front();
    const auto collective = state->collectives.at(seq);
    std::optional<std::string> error = collective->error;
    if (!error && state->failures.count(seq)) {
      error = state->failures.at(seq);
    }
    // Taken out: a rank that arrives late at a failed collective is handled in a later turn.
    std::vector<c10::intrusive_ptr<ThreadWork>> works(state->world_size);
    works.swap(collective->works);
    lock.unlock();
    if (!error) {
      try {
        run_collective(collective->contributions);
      } catch (const c10::Error& exception) {
        error = exception.what_without_backtrace();
      } catch (const std::exception& exception) {
        error = exception.what();
      }
    }
    for (const auto& work : works) {
      if (work) work->complete(error ? make_error(*error) : nullptr);
    }
    lock.lock();
    collective->finished = true;
    collective->contributions.assign(state->world_size, {});  // releases the tensors
    state->changed.notify_all();
  }
}

std::shared_ptr<ThreadBackendControl> ThreadBackendControl::create(int world_size) {
  return std::shared_ptr<ThreadBackendControl>(
      new ThreadBackendControl(std::make_shared<State>(world_size)));
}

ThreadBackendControl::ThreadBackendControl(std::shared_ptr<State> state)
    : state_(std::move(state)), worker_([shared = state_] { State::run_worker(shared); }) {}

ThreadBackendControl::~ThreadBackendControl() {
  abort("the process group was destroyed");
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
    state_->changed.notify_all();
  }
  // A callback on the worker may have dropped the last reference.
  if (worker_.get_id() == std::this_thread::get_id()) {
    worker_.detach();
  } else {
    worker_.join();
  }
}

int ThreadBackendControl::world_size() const { return state_->world_size; }

void ThreadBackendControl::fail(uint64_t seq, const std::string& message) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->failures[seq] = message;
}

void ThreadBackendControl::fail_on_issue(uint64_t seq, int rank, const std::string& message) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->issue_failures[{seq, rank}] = message;
}

void ThreadBackendControl::abort(const std::string& message) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->aborted) {
    state_->aborted = message;
  }
  for (const auto& entry : state_->collectives) {
    if (!entry.second->finished) {
      state_->fail_collective(entry.first, message);
    }
  }
}

void ThreadBackendControl::leave(int rank) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->left.at(rank) = true;
  for (const auto& entry : state_->collectives) {
    if (!entry.second->finished) {
      state_->fail_if_incomplete(entry.first);
    }
  }
}

std::vector<CollectiveRecord> ThreadBackendControl::log(int rank) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->logs.at(rank);
}

size_t ThreadBackendControl::issued(int rank, const std::string& op) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const auto& log = state_->logs.at(rank);
  return std::count_if(log.begin(), log.end(),
                       [&](const CollectiveRecord& record) { return record.op == op; });
}

c10::intrusive_ptr<c10d::Work> ThreadBackendControl::issue(int rank, c10d::OpType type,
                                                           Contribution contribution) {
  prepare(contribution);
  std::lock_guard<std::mutex> lock(state_->mutex);
  const uint64_t seq = state_->logs.at(rank).size();
  contribution.record.seq = seq;
  state_->logs[rank].push_back(contribution.record);
  const auto refused = state_->issue_failures.find({seq, rank});
  if (refused != state_->issue_failures.end()) {
    state_->fail_collective(seq, "collective " + std::to_string(seq) + " failed on rank " +
                                     std::to_string(rank) +
                                     " when it was issued: " + refused->second);
    throw std::runtime_error(refused->second);
  }
  auto work =
      c10::make_intrusive<ThreadWork>(rank, type, seq, contribution.outputs, weak_from_this());
  const auto collective = state_->get(seq);
  collective->works[rank] = work;
  if (!collective->error) {
    for (int other = 0; other < state_->world_size && !collective->error; ++other) {
      if (collective->works[other] && other != rank) {
        collective->error = find_mismatch(other, collective->contributions[other].record, rank,
                                          contribution.record);
      }
    }
    collective->contributions[rank] = std::move(contribution);
    ++collective->arrived;
  }
  if (state_->aborted) {
    state_->fail_collective(seq, *state_->aborted);
  } else {
    state_->fail_if_incomplete(seq);
    state_->schedule(seq);
  }
  return work;
}

std::string ThreadBackendControl::describe_pending(uint64_t seq) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  std::ostringstream missing;
  for (int rank = 0; rank < state_->world_size; ++rank) {
    if (state_->logs[rank].size() <= seq) {
      missing << (missing.tellp() > 0 ? ", " : "") << "rank " << rank << " has issued only "
              << state_->logs[rank].size() << " collectives";
    }
  }
  return missing.str();
}

}  // namespace apex::testing
