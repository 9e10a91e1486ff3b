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
// One thread at a time may change a reducer, and may take as long as other ranks and user code do:
// a communication hook, a bucket callback, a wait for a rank that has died. A mutex that is held
// for so long delays everybody, also who only looks, or wants to abort. So the right to change is
// one thing and the mutex another: the thread that changes opens the monitor while it waits or runs
// user code. Meanwhile others may read; what they read is as the changing thread has left it, which
// opens only where that is consistent. User code may come back to the reducer on the same thread.

/// Guards what belongs to one reducer.
class Monitor {
 public:
  /// The right to change. Waits until no other thread has it; the thread that has it may take it
  /// again.
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
      lock.release();  // held until the outermost Change ends, but for open()
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

  /// The right to read, for a moment: nobody waits for other ranks or runs user code under it.
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

  /// For the thread that changes: others may read while `body` runs.
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

  std::mutex mutex_;  ///< guards open_, and what the monitor guards: see above
  std::condition_variable left_;
  std::atomic<std::thread::id> owner_{std::thread::id()};
  int waiting_ = 0;    ///< threads, for the right to change
  bool open_ = false;  ///< the owner's: it does not hold mutex_ just now
};

}  // namespace apex::parallel::detail
