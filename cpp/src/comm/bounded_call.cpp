// SPDX-License-Identifier: BSD-3-Clause
#include "comm/bounded_call.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace apex::parallel {

struct BoundedCall::Shared {
  std::mutex mutex;  ///< guards done and error
  std::condition_variable ended;
  bool done = false;
  std::exception_ptr error;
  std::atomic<bool> stop{false};
};

BoundedCall::BoundedCall(std::function<void(const std::atomic<bool>& stop)> body)
    : shared_(std::make_shared<Shared>()) {
  std::thread([shared = shared_, body = std::move(body)]() mutable {
    std::exception_ptr error;
    try {
      body(shared->stop);
    } catch (...) {
      error = std::current_exception();
    }
    body = nullptr;  // whoever waits may rely on it that nothing is held any more
    const std::lock_guard<std::mutex> lock(shared->mutex);
    shared->error = std::move(error);
    shared->done = true;
    shared->ended.notify_all();
  }).detach();
}

BoundedCall::~BoundedCall() { leave(); }

bool BoundedCall::wait_until(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  return shared_->ended.wait_until(lock, deadline, [&] { return shared_->done; });
}

void BoundedCall::leave() { shared_->stop = true; }

std::exception_ptr BoundedCall::error() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->error;
}

}  // namespace apex::parallel
