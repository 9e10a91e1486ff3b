// SPDX-License-Identifier: BSD-3-Clause
#include "watch/job_thread.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace apex::parallel {

struct JobThread::State {
  std::mutex mutex;  ///< guards what follows
  std::condition_variable news;
  std::multimap<Clock::time_point, std::function<void()>> jobs;
  bool ended = false;

  static void loop(const std::shared_ptr<State>& state) {
    for (std::unique_lock<std::mutex> lock(state->mutex);;) {
      const auto first = state->jobs.begin();
      if (first != state->jobs.end() && first->first <= Clock::now()) {
        std::function<void()> job = std::move(first->second);
        state->jobs.erase(first);
        lock.unlock();
        job();
        job = nullptr;
        lock.lock();
      } else if (state->ended) {
        return;
      } else if (first == state->jobs.end()) {
        state->news.wait(lock);
      } else {
        state->news.wait_until(lock, first->first);
      }
    }
  }
};

JobThread::JobThread() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { State::loop(state); }).detach();
}

JobThread::~JobThread() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ended = true;
  state_->news.notify_all();
}

void JobThread::run(std::function<void()> job, Clock::time_point at) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->jobs.emplace(at, std::move(job));
  state_->news.notify_all();
}

}  // namespace apex::parallel
