// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_queue.h"

#include <algorithm>
#include <system_error>

#include <ATen/core/jit_type.h>

#include <apex/error.h>

#include "endings.h"
#include "error_text.h"

namespace apex::parallel {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

/// Longest sleep, after which the ranks that are waited for are checked.
constexpr milliseconds kNap{20};
/// Pauses between a worker's looks, which double while other threads run the queue.
constexpr milliseconds kShortPause{1}, kLongPause{4};

milliseconds until_time(HostQueue::Clock::time_point time) {
  return std::chrono::ceil<milliseconds>(time - HostQueue::Clock::now());
}

}  // namespace

// --- HostWork ---

HostWork::HostWork(HostCall call, std::shared_ptr<HostJob> job, std::shared_ptr<HostQueue> queue)
    : Work(-1, call.type, call.profiled_as, call.inputs),
      queue_(std::move(queue)),
      timeout_(std::min<milliseconds>(
          call.timeout == c10d::kUnsetTimeout ? queue_->timeout_ : call.timeout,
          distributed::kLongestTimeout)),
      number_(call.number),
      outputs_(std::move(call.outputs)),
      after_(std::move(call.after)),
      job_(std::move(job)) {}

bool HostWork::is_over() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

bool HostWork::isCompleted() {
  if (!is_over() && queue_->is_own()) queue_->poll();
  return is_over();
}

bool HostWork::isSuccess() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

bool HostWork::wait_for(milliseconds slice) {
  if (!is_over() && !queue_->wait_for(*this, HostQueue::Clock::now() + slice)) return false;
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

bool HostWork::wait(milliseconds timeout) {
  using Clock = HostQueue::Clock;
  const Clock::time_point end =
      timeout == kNoTimeout
          ? Clock::time_point::max()
          : Clock::now() + std::min<milliseconds>(timeout, distributed::kLongestTimeout);
  while (!wait_for(std::clamp(until_time(end), milliseconds(0), milliseconds(1000)))) {
    if (Clock::now() >= end) throw Error("the collective has not completed in time");
  }
  return true;
}

HostWork::FuturePtr HostWork::getFuture() {
  queue_->add_future(*this);
  return future_;
}

/// Runs the callbacks.
void HostWork::complete_future() noexcept {
  try {
    if (exception_) {
      future_->setErrorIfNeeded(exception_);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  } catch (...) {
    // The exception of a callback.
  }
}

// --- HostQueue ---

std::shared_ptr<HostQueue> HostQueue::make(milliseconds timeout, microseconds spin,
                                           std::function<void(const std::string&)> tell) {
  // In a forked process a thread that does not exist may hold the mutex or wait for the conditions.
  return {new HostQueue(timeout, spin, std::move(tell)), [](HostQueue* queue) {
            if (queue->is_own()) delete queue;
          }};
}

HostQueue::WorkPtr HostQueue::issue(HostCall call, std::shared_ptr<HostJob> job) {
  if (!is_own()) throw_forked();
  const bool waits_at_once = call.waits_at_once;
  auto work = c10::make_intrusive<HostWork>(std::move(call), std::move(job), shared_from_this());
  Lock lock(mutex_);
  if (!failure_.empty()) throw Error("an earlier collective of this group failed: " + failure_);
  if (!waits_at_once) want_worker(/*at_once=*/false);
  queue_.push_back(work);
  if (!running_) run(lock, microseconds(0));
  return work;
}

void HostQueue::poll() {
  Lock lock(mutex_);
  if (!running_) run(lock, microseconds(0));
}

bool HostQueue::wait_for(const HostWork& work, Clock::time_point until) {
  if (!is_own()) throw_forked();
  Clock::time_point now = Clock::now(), looked = now;
  const Clock::time_point spin_until = now + spin_;
  Lock lock(mutex_);
  ++waiters_;
  while (!work.is_over()) {
    const auto left = std::chrono::duration_cast<microseconds>(spin_until - now);
    turn(lock, spin_.count() > 0 ? std::max(left, microseconds(1)) : spin_, until, looked);
    now = Clock::now();
    if (now >= until) break;
  }
  --waiters_;
  return work.is_over();
}

/// Runs jobs, or waits until there may be more to run.
/// @param looked  when this thread last looked at the processes of other ranks.
void HostQueue::turn(Lock& lock, microseconds spin, Clock::time_point until,
                     Clock::time_point& looked) {
  const auto longest = [&] { return std::clamp(until_time(until), milliseconds(0), kNap); };
  if (running_) {
    changed_.wait_for(lock, longest());
    return;
  }
  const uint64_t over = over_;
  run(lock, spin);
  if (over_ != over || running_ || queue_.empty()) return;
  WorkPtr first = queue_.front();
  HostJob& job = *first->job_;
  const Clock::time_point now = Clock::now(), end = first->issued_ + first->timeout_;
  try {
    const bool long_ago = now - looked >= kNap;
    if (long_ago) looked = now;
    job.check_ranks(/*processes=*/long_ago);
    if (now >= end) {
      throw Error("timed out: waited for " + job.awaited() + " longer than the timeout of " +
                  std::to_string(first->timeout_.count()) + " ms");
    }
  } catch (...) {
    end_all(lock, std::current_exception());
    lock.unlock();
    first.reset();
    lock.lock();
    return;
  }
  auto sleep = job.sleeper();
  first.reset();
  lock.unlock();
  sleep(std::min(longest(), until_time(end)));
  sleep = nullptr;  // may hold the last reference to the channel, which closes the queue
  lock.lock();
}

/// Runs jobs as far as possible without waiting longer than `spin`. Requires that no thread runs.
void HostQueue::run(Lock& lock, microseconds spin) {
  running_ = true;
  while (!queue_.empty() && failure_.empty()) {
    WorkPtr first = queue_.front();
    lock.unlock();
    bool complete = false;
    std::exception_ptr error;
    try {
      complete = first->job_->advance(spin);
      if (complete) {
        if (first->after_) first->after_();
        // Its tensors are released here, without the mutex: they may be Python's, and another
        // thread may hold the GIL and wait for the mutex.
        first->after_ = nullptr;
        first->job_.reset();
      }
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) {
      end_all(lock, error);
    } else if (!complete) {
      break;
    } else if (failure_.empty()) {
      queue_.pop_front();
      settle(first, nullptr);
    }
    lock.unlock();
    first.reset();
    lock.lock();
  }
  running_ = false;
  if (!failure_.empty() && !queue_.empty()) end_all(lock, nullptr);
  if (queue_.empty()) wanted_ = has_futures_ = false;
  if (waiters_ > 0) changed_.notify_all();
}

/// Requires the mutex.
void HostQueue::settle(const WorkPtr& work, const std::exception_ptr& error) {
  ++over_;
  work->finish(error);
  if (!work->future_) return;
  completed_.push_back(work);
  want_worker(/*at_once=*/true);
}

/// Ends all works; `error` is that of the first one, null: an earlier failure's.
void HostQueue::end_all(Lock& lock, const std::exception_ptr& error) {
  if (failure_.empty()) {
    failure_ = message_of(error);
    tell_(failure_);
  }
  const auto later =
      std::make_exception_ptr(Error("an earlier collective of this group failed: " + failure_));
  std::deque<WorkPtr> ended;  // released without the mutex: see run()
  ended.swap(queue_);
  for (const WorkPtr& work : ended) settle(work, work == ended.front() && error ? error : later);
  changed_.notify_all();
  const bool ran = std::exchange(running_, true);  // nobody else touches the jobs
  lock.unlock();
  for (const WorkPtr& work : ended) {
    work->after_ = nullptr;
    work->job_.reset();
  }
  ended.clear();
  lock.lock();
  running_ = ran;
}

void HostQueue::fail(const std::string& why) noexcept {
  if (!is_own()) return;
  Lock lock(mutex_);
  if (!failure_.empty()) return;
  failure_ = why;
  tell_(why);
  if (!running_) end_all(lock, nullptr);  // else the thread that runs does so
}

bool HostQueue::has_failed() {
  const Lock lock(mutex_);
  return !failure_.empty();
}

void HostQueue::drain() {
  Clock::time_point looked = Clock::now();
  Lock lock(mutex_);
  ++waiters_;
  while (!queue_.empty()) turn(lock, microseconds(0), Clock::time_point::max(), looked);
  --waiters_;
}

// --- the worker ---

void HostQueue::add_future(HostWork& work) {
  if (!is_own()) throw_forked();
  const Lock lock(mutex_);
  if (work.future_) return;
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  const bool over = work.is_over();
  if (!over) {
    want_worker(/*at_once=*/true);
    has_futures_ = true;
  }
  work.future_ = std::move(future);
  if (over) work.complete_future();  // it has no callbacks yet
}

/// Requires the mutex.
void HostQueue::want_worker(bool at_once) {
  wanted_ = true;
  if (in_callbacks_ < workers_.size()) {
    if (at_once || !watched_ || parked_) wake_.notify_all();
    return;
  }
  try {
    workers_.emplace_back([self = shared_from_this()] { self->serve(); });
  } catch (const std::system_error&) {
    if (workers_.empty()) throw;  // else one goes on after its callback
  }
}

void HostQueue::serve() {
  Lock lock(mutex_);
  for (;;) {
    if (!completed_.empty()) {
      WorkPtr work = std::move(completed_.front());
      completed_.pop_front();
      ++in_callbacks_;
      if (!queue_.empty() || !completed_.empty()) want_worker(/*at_once=*/true);
      lock.unlock();
      work->complete_future();
      work.reset();
      lock.lock();
      --in_callbacks_;
    } else if (closed_) {
      return;
    } else if (watched_) {
      wake_.wait(lock);
    } else {
      watched_ = true;
      watch(lock);
      watched_ = false;
    }
  }
}

/// Runs the queue while nobody else does, until there is a future to complete.
void HostQueue::watch(Lock& lock) {
  Clock::time_point looked = Clock::now();
  milliseconds pause = kShortPause;
  uint64_t seen = over_ + 1;
  while (completed_.empty() && !closed_) {
    const bool idle = !wanted_ || queue_.empty();
    if (!idle && waiters_ == 0 && (has_futures_ || over_ == seen)) {
      turn(lock, has_futures_ ? spin_ : microseconds(0), Clock::time_point::max(), looked);
      seen = over_;
      pause = kShortPause;
    } else if (!idle || pause <= kLongPause) {
      seen = over_;
      wake_.wait_for(lock, pause);
      pause = std::min<milliseconds>(2 * pause, 2 * kLongPause);
    } else {
      parked_ = true;
      wake_.wait(lock);
      parked_ = false;
      seen = over_ + 1;
      pause = kShortPause;
    }
  }
}

void HostQueue::close() {
  if (!is_own()) return;
  bool busy = false;
  const auto workers = std::make_shared<std::vector<std::thread>>();
  {
    const Lock lock(mutex_);
    closed_ = true;
    busy = in_callbacks_ > 0;
    workers->swap(workers_);
  }
  wake_.notify_all();
  if (workers->empty()) return;
  // Elsewhere, since this may be a worker, or a thread that a callback waits for.
  end_elsewhere(
      [workers] {
        for (std::thread& worker : *workers) worker.join();
      },
      /*may_be_stuck=*/busy);
}

}  // namespace apex::parallel
