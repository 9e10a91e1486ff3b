// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace apex::parallel::detail {

// Note [Who may touch a reducer]
//
// One thread at a time may change a reducer. Meanwhile it may run user code (a communication
// hook) or wait for other ranks, even for a rank that has died. If it held a mutex
// for that time, it would delay all other threads, even threads that only read or want to abort. So
// the right to change is separate from the mutex. The changing thread opens the monitor while it
// waits or runs user code, and other threads may then read. The changing thread opens the monitor
// only when the state is consistent. User code may call the reducer again on the same thread.

/// A monitor that guards the state of one reducer.
class Monitor {
 public:
  /// The right to change. The constructor waits until no other thread has it. It is recursive.
  class Change {
   public:
    explicit Change(Monitor& monitor) : monitor_(&monitor) {
      if (monitor.is_mine()) {
        reopen_ = monitor.close();
        return;
      }
      std::unique_lock<std::mutex> lock(monitor.mutex_);
      ++monitor.waiting_;
      monitor.left_.wait(lock, [&] { return monitor.owner_.load() == std::thread::id(); });
      --monitor.waiting_;
      monitor.owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
      lock.release();  // held until the outermost Change ends, except in open()
      outermost_ = true;
    }
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;
    ~Change() {
      if (outermost_) {
        monitor_->owner_.store(std::thread::id(), std::memory_order_relaxed);
        const bool awaited = monitor_->waiting_ > 0;
        monitor_->mutex_.unlock();
        if (awaited) monitor_->left_.notify_one();
      } else if (reopen_) {
        monitor_->reopen();
      }
    }

   private:
    Monitor* monitor_;
    bool outermost_ = false;
    bool reopen_ = false;
  };

  /// The right to read, for a short time. Do not wait for other ranks or run user code with it.
  class Read {
   public:
    explicit Read(Monitor& monitor) {
      if (!monitor.is_mine() || monitor.open_) lock_ = std::unique_lock<std::mutex>(monitor.mutex_);
    }

   private:
    std::unique_lock<std::mutex> lock_;
  };

  /// Whether another thread has the right to change.
  bool is_taken() const { return owner_.load() != std::thread::id() && !is_mine(); }

  /// Called by the changing thread: other threads may read while `body` runs.
  template <typename Body>
  decltype(auto) open(Body&& body) {
    struct Closing {
      Monitor* monitor;
      ~Closing() {
        if (monitor != nullptr) monitor->close();
      }
    };
    if (open_) return std::forward<Body>(body)();
    reopen();
    const Closing closing{this};
    return std::forward<Body>(body)();
  }

 private:
  bool is_mine() const {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  bool close() {
    if (!open_) return false;
    mutex_.lock();
    open_ = false;
    return true;
  }
  void reopen() {
    open_ = true;
    mutex_.unlock();
  }

  std::mutex mutex_;  ///< guards open_ and the guarded state: see above
  std::condition_variable left_;
  std::atomic<std::thread::id> owner_{std::thread::id()};
  int waiting_ = 0;    ///< threads that wait for the right to change
  bool open_ = false;  ///< the owner does not hold mutex_ now
};

}  // namespace apex::parallel::detail
