// SPDX-License-Identifier: BSD-3-Clause
#include "transport/backend_work.h"

#include <algorithm>
#include <limits>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>

#include <apex/error.h>

#include "endings.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

class GlooWork final : public SlicedWork {
 public:
  explicit GlooWork(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  bool isCompleted() override { return work_->isCompleted(); }

  bool wait_for(milliseconds slice) override {
    if (slice.count() == 0) return work_->isCompleted() && work_->wait();
    try {
      return work_->wait(slice);
    } catch (...) {
      return work_->isCompleted() && work_->wait();  // false: the slice timed out
    }
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

// --- BackendWork ---

BackendWork::BackendWork(int rank, c10d::OpType type, const char* title, uint64_t number,
                         milliseconds timeout, const Tensors& inputs, Tensors outputs,
                         std::shared_ptr<BackendWorks> works)
    : SlicedWork(rank, type, title, inputs),
      what_(title),
      number_(number),
      timeout_(std::min<milliseconds>(timeout, distributed::kLongestTimeout)),
      works_(std::move(works)),
      outputs_(std::move(outputs)) {}

BackendWork::BackendWork(BackendWork&& dropped)
    : SlicedWork(dropped.rank_, dropped.opType_),
      number_(dropped.number_),
      part_(std::move(dropped.part_)),
      outputs_(std::move(dropped.outputs_)),
      copies_(std::move(dropped.copies_)),
      divisor_(dropped.divisor_) {}

BackendWork::~BackendWork() {
  if (!works_ || !part_) return;
  try {
    leave();
    works_->add_dropped(std::move(*this));
  } catch (const std::exception&) {
    // Its result is not written.
  }
}

void BackendWork::split_later(const at::Tensor& flat, const Tensors& tensors) {
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    copies_.emplace_back(tensor, flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

void BackendWork::start(const c10::intrusive_ptr<c10d::Work>& part) {
  if (auto* const sliced = dynamic_cast<SlicedWork*>(part.get())) {
    part_ = Part::reclaim_copy(sliced);
  } else {
    part_ = c10::make_intrusive<GlooWork>(part);
  }
  auto* const in_memory = dynamic_cast<HostWork*>(part.get());
  if (in_memory != nullptr && timeout_ != c10d::kUnsetTimeout) in_memory->within(timeout_);
}

bool BackendWork::isCompleted() {
  try {
    return wait_for(milliseconds(0));
  } catch (...) {
    return true;  // wait() reports the error
  }
}

bool BackendWork::wait_for(milliseconds slice) {
  const Clock::time_point until =
      Clock::now() + std::min<milliseconds>(slice, distributed::kLongestTimeout);
  if (!is_over()) {
    try {
      if (const Part part = this->part(); part && !part->wait_for(slice)) return false;
      if (works_ && !works_->dropped_have_completed(number_, until)) return false;
      settle(nullptr);
    } catch (...) {
      settle(std::current_exception());
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

BackendWork::FuturePtr BackendWork::getFuture() {
  const std::lock_guard<std::mutex> lock(making_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (is_over()) {
    complete_future();
    return future_;
  }
  try {
    works_->add_future(BackendWorkPtr::unsafe_reclaim_from_nonowning(this));
  } catch (...) {
    future_.reset();
    throw;
  }
  return future_;
}

void BackendWork::await() noexcept {
  try {
    wait();
  } catch (...) {
  }
}

void BackendWork::complete_future() noexcept {
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

/// Runs once, for the first caller that sees the part completed or failed.
void BackendWork::settle(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(settling_);
  if (is_over()) return;
  if (!error) {
    try {
      const at::AutoDispatchBelowADInplaceOrView guard;
      const at::NoGradGuard no_grad;
      for (const auto& [to, from] : copies_) to.copy_(from);
      if (divisor_ != 1) {
        for (const at::Tensor& output : outputs_) output.div_(divisor_);
      }
    } catch (...) {
      error = std::current_exception();
    }
  }
  copies_.clear();
  finish(error);
  // The part keeps its channel alive: peers see that this rank has left when it is destroyed.
  Part ended;  // destroyed after the lock is released
  const std::lock_guard<std::mutex> held(mutex_);
  ended.swap(part_);
}

// --- BackendWorks ---

void BackendWorks::add_future(BackendWorkPtr work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (this_pid() != pid_) throw Error("this process was forked from the one of its group");
    if (ended_) throw Error("the process group was destroyed");
    if (idle_ <= futures_.size() && (threads_.empty() || in_callback_ == threads_.size()))
      threads_.emplace_back([self = shared_from_this()] { self->run(); });
    futures_.push_back(std::move(work));
  }
  changed_.notify_one();
}

void BackendWorks::add_dropped(BackendWork&& work) {
  if (this_pid() != pid_) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return;
    const uint64_t number = work.getSequencenumber();
    dropped_.emplace(number, c10::make_intrusive<BackendWork>(std::move(work)));
    some_dropped_ = true;
  }
  // A program that drops all works waits for none of them, so complete finished works here.
  dropped_have_completed(std::numeric_limits<uint64_t>::max(), Clock::now());
}

bool BackendWorks::dropped_have_completed(uint64_t before, Clock::time_point until) {
  if (!some_dropped_) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!dropped_.empty() && dropped_.begin()->first < before) {
    const BackendWorkPtr first = dropped_.begin()->second;
    lock.unlock();
    const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
    try {
      if (!first->wait_for(std::max(left, milliseconds(0)))) return false;
    } catch (...) {
      // No caller uses its result; later works fail as well.
    }
    lock.lock();
    dropped_.erase(first->getSequencenumber());
  }
  some_dropped_ = !dropped_.empty();
  return true;
}

void BackendWorks::end() {
  if (this_pid() != pid_) return;
  bool busy = false;
  std::vector<std::thread> threads;
  std::map<uint64_t, BackendWorkPtr> dropped;  // destroyed after the lock is released
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    busy = idle_ < threads_.size();
    threads.swap(threads_);
    dropped.swap(dropped_);
  }
  changed_.notify_all();
  if (threads.empty()) return;
  const auto held = std::make_shared<std::vector<std::thread>>(std::move(threads));
  end_elsewhere(
      [held] {
        for (std::thread& thread : *held) thread.join();
      },
      /*may_be_stuck=*/busy);
}

void BackendWorks::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    changed_.wait(lock, [this] { return ended_ || !futures_.empty(); });
    --idle_;
    if (futures_.empty()) return;
    BackendWorkPtr work = std::move(futures_.front());
    futures_.pop_front();
    lock.unlock();
    work->await();
    lock.lock();
    ++in_callback_;
    // A callback may wait for a work that is still queued.
    if (!futures_.empty() && !ended_ && in_callback_ == threads_.size()) {
      try {
        threads_.emplace_back([self = shared_from_this()] { self->run(); });
      } catch (const std::system_error&) {
        // No thread can be created: this one serves the queue after the callback.
      }
    }
    lock.unlock();
    work->complete_future();
    work.reset();  // its tensors may be held by Python
    lock.lock();
    --in_callback_;
  }
}

}  // namespace apex::parallel
