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
/// Between two looks of a worker.
constexpr milliseconds kPause{2};

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
      job_(std::move(job)) {}

bool HostWork::isCompleted() {
  if (!is_over() && queue_->is_own()) queue_->poll();
  return is_over();
}

bool HostWork::wait_for(milliseconds slice) {
  if (!is_over() && !queue_->wait_for(*this, HostQueue::Clock::now() + slice)) return false;
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

bool HostWork::wait(milliseconds timeout) {
  const milliseconds longest = distributed::kLongestTimeout;
  if (!wait_for(timeout == kNoTimeout ? longest : std::min(timeout, longest)))
    throw Error("the collective has not completed in time");
  return true;
}

HostWork::FuturePtr HostWork::getFuture() { return queue_->future_of(*this); }

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
  if (!failure_.empty()) std::rethrow_exception(failed_before());
  if (!waits_at_once) want_worker();
  queue_.push_back(work);
  if (!running_) run(lock, microseconds(0));
  return work;
}

void HostQueue::poll() {
  Lock lock(mutex_);
  if (!running_) run(lock, microseconds(0));
}

bool HostQueue::wait_for(HostWork& work, Clock::time_point until) {
  if (!is_own()) throw_forked();
  Clock::time_point now = Clock::now();
  const Clock::time_point spin_until = now + spin_;
  Lock lock(mutex_);
  if (waiters_++ == 0) looked_ = now;
  while (!work.is_over()) {
    const auto left = std::chrono::duration_cast<microseconds>(spin_until - now);
    turn(lock, spin_.count() > 0 ? std::max(left, microseconds(1)) : spin_, until);
    now = Clock::now();
    if (now >= until) break;
  }
  --waiters_;
  return work.is_over();
}

/// Runs jobs, or waits until there may be more to run.
void HostQueue::turn(Lock& lock, microseconds spin, Clock::time_point until) {
  const auto longest = [&] { return std::clamp(until_time(until), milliseconds(0), kNap); };
  if (running_) {
    changed_.wait_for(lock, longest());
    return;
  }
  const uint64_t over = over_;
  run(lock, spin);
  if (over_ != over || queue_.empty()) return;
  const HostWork& first = *queue_.front();
  const Clock::time_point now = Clock::now(), end = first.issued_ + first.timeout_;
  try {
    const bool long_ago = now - looked_ >= kNap;
    if (long_ago) looked_ = now;
    first.job_->check_ranks(/*processes=*/long_ago);
    if (now >= end) {
      throw Error("timed out: waited for " + first.job_->awaited() +
                  " longer than the timeout of " + std::to_string(first.timeout_.count()) + " ms");
    }
  } catch (...) {
    end_all(lock, std::current_exception());
    return;
  }
  auto sleep = first.job_->sleeper();
  lock.unlock();
  sleep(std::min(longest(), until_time(end)));
  sleep = nullptr;  // may hold the last reference to the channel, which closes the queue
  lock.lock();
}

/// Runs jobs as far as possible without waiting longer than `spin`. Requires that no thread runs.
void HostQueue::run(Lock& lock, microseconds spin) {
  running_ = true;
  for (bool complete = true; complete && !queue_.empty() && failure_.empty();) {
    WorkPtr first = queue_.front();
    lock.unlock();
    std::exception_ptr error;
    try {
      complete = first->job_->advance(spin);
      if (complete) first->job_.reset();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) {
      end_all(lock, error);
    } else if (complete && failure_.empty()) {
      queue_.pop_front();
      ++over_;
      first->finish();
      if (first->future_) wake_.notify_all();
    }
    lock.unlock();
    first.reset();
    lock.lock();
  }
  running_ = false;
  if (!failure_.empty() && !queue_.empty()) end_all(lock, nullptr);
  changed_.notify_all();
}

/// Ends all works; `error` is that of the first one, null: an earlier failure's.
void HostQueue::end_all(Lock& lock, std::exception_ptr error) {
  if (failure_.empty()) {
    failure_ = message_of(error);
    tell_(failure_);
  }
  const std::exception_ptr later = failed_before();
  std::deque<WorkPtr> ended;
  ended.swap(queue_);
  running_ = true;
  lock.unlock();
  for (const WorkPtr& work : ended) {
    work->job_.reset();
    work->finish(error ? std::exchange(error, nullptr) : later);
  }
  ended.clear();
  lock.lock();
  running_ = false;
  ++over_;
  changed_.notify_all();
  wake_.notify_all();
}

/// The error of collectives after a failure. Requires the mutex.
std::exception_ptr HostQueue::failed_before() const {
  return std::make_exception_ptr(Error("an earlier collective of this group failed: " + failure_));
}

void HostQueue::fail(const std::string& why) noexcept {
  if (!is_own()) return;
  Lock lock(mutex_);
  if (!failure_.empty()) return;
  failure_ = why;
  tell_(why);
  if (!running_) end_all(lock, nullptr);  // else the thread that runs does so
}

void HostQueue::drain() {
  Lock lock(mutex_);
  ++waiters_;
  while (!queue_.empty()) turn(lock, microseconds(0), Clock::time_point::max());
  --waiters_;
}

// --- the worker ---

HostWork::FuturePtr HostQueue::future_of(HostWork& work) {
  if (!is_own()) throw_forked();
  const Lock lock(mutex_);
  if (!work.future_) {
    work.future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (work.is_over()) {
      work.complete_future();  // it has no callbacks yet
    } else {
      futures_.push_back(WorkPtr::reclaim_copy(&work));
      want_worker();
      wake_.notify_all();
    }
  }
  return work.future_;
}

/// Requires the mutex.
void HostQueue::want_worker() {
  if (in_callbacks_ < workers_.size()) {
    if (parked_ > 0) wake_.notify_all();
    return;
  }
  try {
    workers_.emplace_back([self = shared_from_this()] { self->serve(); });
  } catch (const std::system_error&) {
    if (workers_.empty()) throw;  // else one goes on after its callback
  }
}

void HostQueue::serve() {
  constexpr Clock::time_point kNever = Clock::time_point::max();
  Lock lock(mutex_);
  for (uint64_t seen = over_ + 1;;) {
    const auto over = std::find_if(futures_.begin(), futures_.end(),
                                   [](const WorkPtr& work) { return work->is_over(); });
    if (over != futures_.end()) {
      WorkPtr work = std::move(*over);
      futures_.erase(over);
      ++in_callbacks_;
      if (!queue_.empty() || !futures_.empty()) want_worker();
      lock.unlock();
      work->complete_future();
      work.reset();
      lock.lock();
      --in_callbacks_;
    } else if (closed_) {
      return;
    } else if (!futures_.empty()) {
      turn(lock, spin_, kNever);
    } else if (queue_.empty()) {
      ++parked_;
      wake_.wait(lock);
      --parked_;
    } else if (waiters_ == 0 && over_ == seen) {
      turn(lock, microseconds(0), kNever);
      seen = over_;
    } else {
      seen = over_;
      wake_.wait_for(lock, kPause);
    }
  }
}

bool HostQueue::close() {
  bool busy = false, failed = false;
  const auto workers = std::make_shared<std::vector<std::thread>>();
  {
    const Lock lock(mutex_);
    closed_ = true;
    busy = in_callbacks_ > 0;
    failed = !failure_.empty();
    workers->swap(workers_);
  }
  wake_.notify_all();
  if (!workers->empty()) {
    // Elsewhere, since this may be a worker, or a thread that a callback waits for.
    end_elsewhere(
        [workers] {
          for (std::thread& worker : *workers) worker.join();
        },
        /*may_be_stuck=*/busy);
  }
  return !failed;
}

}  // namespace apex::parallel
