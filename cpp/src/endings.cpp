// SPDX-License-Identifier: BSD-3-Clause
#include "endings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "watch/process_state.h"

namespace apex::parallel {

namespace {

/// Threads that destroy backends.
struct Endings {
  struct Ending {
    std::thread thread;
    std::shared_ptr<std::atomic<bool>> done;
    bool may_be_stuck = false;
  };
  std::mutex mutex;  ///< guards running
  std::vector<Ending> running;
  const int64_t pid = this_pid();
};

// Never destroyed; an atexit handler waits for the threads that still run. A forked process has
// none of these threads, and begins anew.
Endings& endings() {
  static std::atomic<Endings*> all{nullptr};
  Endings* current = all.load();
  if (current != nullptr && current->pid == this_pid()) return *current;
  const bool is_first = current == nullptr;
  auto* const made = new Endings;
  if (!all.compare_exchange_strong(current, made)) {  // another thread was faster
    delete made;
    return *current;
  }
  if (is_first) std::atexit(finish_dropped_groups);
  return *made;
}

thread_local bool is_elsewhere = false;

}  // namespace

void end_elsewhere(std::function<void()> end, bool may_be_stuck) noexcept try {
  if (is_elsewhere) return end();  // what ends holds the last reference to something else
  Endings& all = endings();
  std::unique_lock<std::mutex> lock(all.mutex);
  for (Endings::Ending& ending : all.running) {
    if (ending.done->load()) ending.thread.join();
  }
  const auto joined = [](const Endings::Ending& ending) { return !ending.thread.joinable(); };
  all.running.erase(std::remove_if(all.running.begin(), all.running.end(), joined),
                    all.running.end());
  auto done = std::make_shared<std::atomic<bool>>(false);
  // Shared, so that it can still be called here if no thread can be created.
  const auto called = std::make_shared<std::function<void()>>(std::move(end));
  const auto call = [called] {
    (*called)();
    *called = nullptr;
  };
  try {
    std::thread thread([done, call] {
      is_elsewhere = true;
      call();
      done->store(true);
    });
    all.running.push_back({std::move(thread), std::move(done), may_be_stuck});
  } catch (const std::system_error&) {
    lock.unlock();  // what ends may end something else
    call();
  }
} catch (...) {
  // No caller can handle an error here.
}

void finish_dropped_groups() {
  std::vector<Endings::Ending> running;
  {
    const std::lock_guard<std::mutex> lock(endings().mutex);
    running.swap(endings().running);
  }
  // A failed collective may wait for its rank until the timeout. All other threads end soon, and
  // must not outlive the interpreter, since they may have to release Python objects.
  constexpr std::chrono::milliseconds kLook{1}, kLongest{1000};
  auto left = kLongest;
  for (Endings::Ending& ending : running) {
    for (; ending.may_be_stuck && !ending.done->load() && left.count() > 0; left -= kLook)
      std::this_thread::sleep_for(kLook);
    ending.may_be_stuck && !ending.done->load() ? ending.thread.detach() : ending.thread.join();
  }
}

}  // namespace apex::parallel
