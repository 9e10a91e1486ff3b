// SPDX-License-Identifier: BSD-3-Clause
#include <support/thread_backend_control.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>

namespace apex::testing {
namespace {

std::exception_ptr make_error(const std::string& message) {
  return std::make_exception_ptr(std::runtime_error(message));
}

struct Collective {
  explicit Collective(int world) : contributions(world), works(world) {}
  std::vector<Contribution> contributions;
  std::vector<c10::intrusive_ptr<ThreadWork>> works;  // null: not arrived yet
  int arrived = 0;
  bool scheduled = false;
  bool finished = false;
  std::optional<std::string> error;
};

}  // namespace

ThreadWork::ThreadWork(int rank, c10d::OpType type, uint64_t seq, std::chrono::milliseconds timeout,
                       std::vector<at::Tensor> results, std::weak_ptr<ThreadBackendControl> control)
    : c10d::Work(rank, type),
      seq_(seq),
      timeout_(timeout),
      results_(std::move(results)),
      control_(std::move(control)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
}

void ThreadWork::complete(std::exception_ptr error) {
  if (claimed_.exchange(true)) {
    return;
  }
  // Complete the future first, as Gloo does: callbacks have run when wait() returns.
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(results_));
  }
  finish(error);
}

void ThreadWork::abort() {
  complete(make_error("collective " + std::to_string(seq_) + " was aborted"));
}

bool ThreadWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout == kNoTimeout ? timeout_ : timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!cv_.wait_for(lock, limit, [&] { return completed_; })) {
    lock.unlock();
    const auto control = control_.lock();
    throw std::runtime_error(
        "rank " + std::to_string(rank_) + ": collective " + std::to_string(seq_) +
        " did not complete within " + std::to_string(limit.count()) +
        " ms: " + (control ? control->describe_pending(seq_) : "its process group is gone"));
  }
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  return true;
}

struct ThreadBackendControl::State {
  State(int world, std::chrono::milliseconds limit)
      : world_size(world), timeout(limit), logs(world), left(world) {}

  const int world_size;
  const std::chrono::milliseconds timeout;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<CollectiveRecord>> logs;
  std::vector<bool> left;
  std::map<uint64_t, std::shared_ptr<Collective>> collectives;
  std::set<uint64_t> released;
  bool holds_all = false;
  std::map<uint64_t, std::string> failures;
  std::map<std::pair<uint64_t, int>, std::string> issue_failures;
  std::optional<std::string> aborted;
  std::vector<uint64_t> completed;
  std::deque<uint64_t> ready;
  bool stop = false;
  bool allocates = false, allocation_fails = false;
  std::set<const void*> allocated;

  // The functions below require the mutex.

  std::shared_ptr<Collective> get(uint64_t seq) {
    auto& slot = collectives[seq];
    if (!slot) {
      slot = std::make_shared<Collective>(world_size);
    }
    return slot;
  }

  bool is_held(uint64_t seq) const { return holds_all && !released.count(seq); }

  // Schedules the collective if it has failed, or if all ranks have arrived and nothing holds it.
  void schedule(uint64_t seq) {
    const auto found = collectives.find(seq);
    if (found == collectives.end()) {
      return;
    }
    Collective& collective = *found->second;
    if (collective.error) {
      ready.push_back(seq);  // again for ranks that arrive late
    } else if (!collective.scheduled && collective.arrived == world_size && !is_held(seq)) {
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
    // A callback may query the control, so the collective counts as completed before callbacks run.
    lock.lock();
    if (!error) {
      state->completed.push_back(seq);
    }
    lock.unlock();
    for (const auto& work : works) {
      if (work) work->complete(error ? make_error(*error) : nullptr);
    }
    lock.lock();
    collective->finished = true;
    collective->contributions.assign(state->world_size, {});  // releases the tensors
    state->changed.notify_all();
  }
}

std::shared_ptr<ThreadBackendControl> ThreadBackendControl::create(
    int world_size, std::chrono::milliseconds timeout) {
  return std::shared_ptr<ThreadBackendControl>(
      new ThreadBackendControl(std::make_shared<State>(world_size, timeout)));
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

std::chrono::milliseconds ThreadBackendControl::timeout() const { return state_->timeout; }

void ThreadBackendControl::hold_all() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->holds_all = true;
}

void ThreadBackendControl::release(uint64_t seq) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->released.insert(seq);
  state_->schedule(seq);
}

void ThreadBackendControl::fail(uint64_t seq, const std::string& message) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->failures[seq] = message;
}

void ThreadBackendControl::fail_on_issue(uint64_t seq, int rank, const std::string& message) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->issue_failures[{seq, rank}] = message;
}

void ThreadBackendControl::allocate_tensors(bool fails) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->allocates = true;
  state_->allocation_fails = fails;
}

bool ThreadBackendControl::allocates() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->allocates;
}

at::Tensor ThreadBackendControl::allocate(int64_t size, const at::TensorOptions& options) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->allocation_fails) throw std::runtime_error("no more memory here\nsecond line");
  at::Tensor tensor = at::full({size}, 7, options);  // pool memory has arbitrary content
  state_->allocated.insert(tensor.const_data_ptr());
  return tensor;
}

std::set<const void*> ThreadBackendControl::allocated() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->allocated;
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

size_t ThreadBackendControl::issued(int rank) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->logs.at(rank).size();
}

size_t ThreadBackendControl::issued(int rank, const std::string& op) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const auto& log = state_->logs.at(rank);
  return std::count_if(log.begin(), log.end(),
                       [&](const CollectiveRecord& record) { return record.op == op; });
}

std::vector<uint64_t> ThreadBackendControl::completed() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->completed;
}

void ThreadBackendControl::wait_until_issued(uint64_t seq) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  const auto issued = [&] {
    return std::all_of(state_->logs.begin(), state_->logs.end(),
                       [&](const auto& log) { return log.size() > seq; });
  };
  if (!state_->changed.wait_for(lock, state_->timeout, issued))
    throw std::runtime_error("collective " + std::to_string(seq) +
                             " was not issued by every rank within " +
                             std::to_string(state_->timeout.count()) + " ms");
}

c10::intrusive_ptr<ThreadWork> ThreadBackendControl::issue(int rank, c10d::OpType type,
                                                           Contribution contribution,
                                                           std::vector<at::Tensor> results,
                                                           std::chrono::milliseconds timeout) {
  check_contribution(contribution);
  complete_contribution(contribution);
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
  auto work = c10::make_intrusive<ThreadWork>(rank, type, seq, timeout, std::move(results),
                                              weak_from_this());
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
  if (missing.tellp() > 0) {
    return missing.str();
  }
  return "the test holds it";
}

}  // namespace apex::testing
