// SPDX-License-Identifier: BSD-3-Clause
#include "watch/board.h"

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include <apex/error.h>

#include "plain_text.h"
#include "watch/forced_unwind.h"
#include "watch/neighbours.h"
#include "watch/stall.h"
#include "watch/timing.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using std::chrono::milliseconds;
using Clock = Board::Clock;

/// Appends a text of one rank.
void append(c10d::Store& store, const std::string& key, int rank, const std::string& text) {
  PlainText out;
  out << rank << ' ' << std::quoted(text) << '\n';
  const std::string entry = out.str();
  store.append(key, std::vector<uint8_t>(entry.begin(), entry.end()));
}

/// The last text of each rank.
std::map<int, std::string> read_appended(c10d::Store& store, const std::string& key) {
  std::istringstream in(get_or_empty(store, key));
  std::map<int, std::string> by_rank;
  std::string text;
  for (int rank = 0; in >> rank >> std::quoted(text);) by_rank[rank] = text;
  return by_rank;
}

std::atomic<int> boards{0};  ///< of this process, which look for news in turn

/// Until when the store's process should stay; see stay_for_readers().
std::atomic<Clock::time_point> stays_until{Clock::time_point()};

}  // namespace

std::string get_or_empty(c10d::Store& store, const std::string& key) {
  return store.check({key}) ? store.get_to_str(key) : std::string();
}

void stay_for_readers() { std::this_thread::sleep_until(stays_until.load()); }

Board::Board(const c10d::ProcessGroup& group, milliseconds how_long)
    : group_name(group.getGroupName()),
      rank(group.getRank()),
      size(group.getSize()),
      timeout(how_long),
      patience(timeout == milliseconds(0)
                   ? timing::kMostPatience
                   : std::clamp(timeout / 8, timing::kLeastPatience, timing::kMostPatience)),
      has_store(group.getStore()->hasExtendedApi()),
      given_(has_store ? group.getStore() : nullptr) {
  ++boards;
}

Board::~Board() { --boards; }

std::shared_ptr<Board> Board::create(const c10d::ProcessGroup& group, milliseconds timeout) {
  const auto board = std::make_shared<Board>(group, timeout);
  // The thread also has a reference.
  return {board.get(), [board, pid = this_pid()](Board*) {
            if (pid != this_pid()) return;  // the thread may have held the mutex at the fork
            const std::lock_guard<std::mutex> lock(board->mutex_);
            board->ended_ = true;
            board->news_.notify_all();
          }};
}

void Board::begin() {
  if (!has_store) return;
  post([self = shared_from_this()](c10d::Store& store) {
    // A store that outlives a group may have seen an earlier group of this name, possibly with
    // fewer ranks, so the key includes the size and counts instances per rank.
    const std::string base = self->group_name + "/" + std::to_string(self->size);
    const std::string mine = "apex/introduced/" + base + "/" + std::to_string(self->rank);
    self->name_ = base + "/" + std::to_string(store.add(mine, 1));
    if (const auto process = this_process())
      append(store, self->key("process/" + process->host), self->rank, process->encode());
  });
  looked_ = Clock::now();
  look_at_ = looked_ + timing::kIdle * boards.load();
  std::thread([self = shared_from_this()] { self->loop(); }).detach();
}

// --- the board's thread ---

void Board::loop() {
  for (std::unique_lock<std::mutex> lock(mutex_); !ended_ || !jobs_.empty();) {
    const auto next = std::min(look_at_, watch_at_);
    if (!jobs_.empty()) {
      std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
    } else if (Clock::now() < next) {
      news_.wait_until(lock, next);
    } else {
      lock.unlock();
      look();
      lock.lock();
    }
  }
}

void Board::run(const Body& body) {
  if (given_) {
    const auto given = std::move(given_);
    store_ = given->clone();
  }
  if (!store_) throw Error("the store was lost");
  try {
    body(*store_);
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    store_.reset();
    throw;
  }
}

std::shared_future<void> Board::post(Body body) {
  const auto task = std::make_shared<std::packaged_task<void()>>(
      [self = shared_from_this(), body = std::move(body)] { self->run(body); });
  std::shared_future<void> future = task->get_future().share();
  if (!has_store) return future;  // it holds a broken promise
  const std::lock_guard<std::mutex> lock(mutex_);
  jobs_.emplace_back([task] { (*task)(); });
  news_.notify_all();
  return future;
}

void Board::look_if_older(milliseconds age, bool needs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  needs_look_ = needs_look_ || needs;
  if (look_at_ <= looked_ + age) return;
  look_at_ = looked_ + age;
  news_.notify_all();
}

void Board::watch_gpus() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (watch_at_ != Clock::time_point::max()) return;
  watch_at_ = Clock::now();
  news_.notify_all();
}

void Board::look() {
  const auto began = Clock::now();
  bool looks = false, needs = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    looks = began >= look_at_;
    if (looks) {
      looked_ = began;
      look_at_ = began + timing::kIdle * std::max(1, boards.load());
      needs = std::exchange(needs_look_, false);
    }
    if (began >= watch_at_) watch_at_ = began + between_gpu_looks(*this);
  }
  if (looks) {
    forget_destroyed_groups();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return;
  }
  // A process that has ended may have hosted the store, and torch logs every call of a lost store.
  looks = looks && (needs || look_around(ProcessState::kEnded).empty());
  try {
    run([&](c10d::Store& store) {
      if (looks) read_news(store);
      watch_waits(*this, store);
    });
    if (looks) answered_ = began;
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    failed_ = Clock::now();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  news_.notify_all();
}

void Board::read_news(c10d::Store& store) {
  const int64_t news = store.add(key("news"), 0);
  if (news == seen_) return;
  RankRecords found;
  for (const auto& [other, text] : read_appended(store, key("failed")))
    found[other] = RankRecord::decode(text);
  const int64_t asked = store.add(key("asked"), 0);
  if (asked != std::exchange(asked_, asked)) said_elsewhere = !publish(store);
  const std::lock_guard<std::mutex> lock(mutex_);
  seen_ = news;
  reports_ = std::move(found);
}

bool Board::publish(c10d::Store& store) {
  RankRecord mine = position(*this);
  mine.asked = asked_;
  store.set(key_of(rank), mine.encode());
  return mine.waits;
}

int64_t Board::ask(c10d::Store& store) {
  asked_ = store.add(key("asked"), 1);
  publish(store);
  store.add(key("news"), 1);
  find_processes(store);
  wake();
  return asked_;
}

void Board::wait_for_news(Clock::time_point until) {
  std::unique_lock<std::mutex> lock(mutex_);
  news_.wait_until(lock, until);
}

// --- failures ---

std::shared_future<void> Board::report(const std::string& what, const std::string& cause,
                                       const Proof& proof) {
  RankRecord record;
  record.failure = what;
  record.cause = cause;
  record.proof = proof;
  has_failed_ = true;
  const char* const agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");  // torchrun's store
  if (rank == 0 && has_store && (agent == nullptr || std::string(agent) != "True")) {
    static const int at_exit = std::atexit(stay_for_readers);
    if (at_exit == 0) stays_until = Clock::now() + timing::kStays;
  }
  return post([self = shared_from_this(), text = record.encode()](c10d::Store& store) {
    append(store, self->key("failed"), self->rank, text);
    store.add(self->key("news"), 1);  // last, so that a rank that sees the count finds the report
    self->find_processes(store);
    self->wake();
  });
}

RankRecords Board::reports() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reports_;
}

// --- processes ---

void Board::add_processes(std::map<int, ProcessName> found) {
  found.erase(rank);
  for (const auto& [other, process] : found) watch_process(process);
  const std::lock_guard<std::mutex> lock(mutex_);
  found.merge(processes_);
  processes_.swap(found);
}

std::map<int, ProcessName> Board::processes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return processes_;
}

bool Board::all_on_this_host() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(processes_.size()) == size - 1;
}

/// Reads those that are published, if none is known.
void Board::find_processes(c10d::Store& store) {
  const auto self = this_process();
  if (!self || !processes().empty()) return;
  std::map<int, ProcessName> found;
  for (const auto& [other, text] : read_appended(store, key("process/" + self->host))) {
    if (auto name = ProcessName::decode(text)) found.emplace(other, std::move(*name));
  }
  add_processes(std::move(found));
}

Proof Board::look_around(std::optional<ProcessState> only) {
  Proof proof;
  for (const auto& [other, process] : processes()) {
    const std::string name = "process " + std::to_string(process.pid);
    const ProcessState state = state_of(process);
    if (only && state != *only) continue;
    if (state == ProcessState::kEnded) proof[other] = "has ended (" + name + ")";
    if (state == ProcessState::kStopped)
      proof[other] = "is stopped (" + name + ", by a signal or a debugger)";
  }
  return proof;
}

/// Makes the ranks of this host look for news.
void Board::wake() {
  for (const auto& [other, process] : processes()) wake_process(process);
}

}  // namespace apex::parallel
