// SPDX-License-Identifier: BSD-3-Clause
#include "watch/board.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <apex/error.h>

#include "watch/forced_unwind.h"
#include "watch/neighbours.h"
#include "watch/stall.h"
#include "watch/timing.h"
#include "watch/watched_group.h"

namespace apex::parallel {

namespace {

using std::chrono::milliseconds;
using Clock = Board::Clock;

StorePtr base_of(StorePtr store) {
  while (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    store = prefixed->getUnderlyingStore();
  return store;
}

/// Appends a text of one rank: "LENGTH RANK\nTEXT".
void append(c10d::Store& store, const std::string& key, int rank, const std::string& text) {
  const std::string entry = std::to_string(text.size()) + ' ' + std::to_string(rank) + '\n' + text;
  store.append(key, std::vector<uint8_t>(entry.begin(), entry.end()));
}

/// The last text of each rank.
std::map<int, std::string> read_appended(c10d::Store& store, const std::string& key) {
  const std::string all = get_or_empty(store, key);
  std::map<int, std::string> by_rank;
  for (size_t begin = 0; begin < all.size();) {
    const size_t space = all.find(' ', begin), line = all.find('\n', begin);
    if (line == std::string::npos || space > line) break;
    const auto length = static_cast<size_t>(std::atoll(all.c_str() + begin));
    if (length > all.size() - line - 1) break;
    by_rank[std::atoi(all.c_str() + space + 1)] = all.substr(line + 1, length);
    begin = line + 1 + length;
  }
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

/// The thread that calls one store, for all groups on it. Due jobs run in the order of their times;
/// those that are due when it ends still run.
class StoreThread {
 public:
  static std::shared_ptr<StoreThread> of(const c10d::Store* base) {
    // Of the server, or of the store: a new store may get the address of an old one.
    std::ostringstream address;
    address << this_pid() << ' ';
    if (const auto* const tcp = dynamic_cast<const c10d::TCPStore*>(base)) {
      address << tcp->getHost() << ' ' << tcp->getPort();
    } else {
      address << base;
    }
    // Never destroyed: groups may be created while the process exits.
    static auto* const mutex = new std::mutex;
    static auto* const all = new std::map<std::string, std::weak_ptr<StoreThread>>;
    const std::lock_guard<std::mutex> lock(*mutex);
    for (auto known = all->begin(); known != all->end();)
      known = known->second.expired() ? all->erase(known) : std::next(known);
    std::weak_ptr<StoreThread>& known = (*all)[address.str()];
    std::shared_ptr<StoreThread> thread = known.lock();
    if (!thread) known = thread = std::make_shared<StoreThread>();
    return thread;
  }

  StoreThread() {
    std::thread([state = state_] { loop(*state); }).detach();
  }
  ~StoreThread() {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->ended = true;
    state_->news.notify_all();
  }
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  void run_at(Clock::time_point at, std::function<void()> job) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->jobs.emplace(at, std::move(job));
    state_->news.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;  ///< guards what follows
    std::condition_variable news;
    std::multimap<Clock::time_point, std::function<void()>> jobs;
    bool ended = false;
  };

  static void loop(State& state) {
    for (std::unique_lock<std::mutex> lock(state.mutex);;) {
      const auto first = state.jobs.begin();
      if (first != state.jobs.end() && first->first <= Clock::now()) {
        std::function<void()> job = std::move(first->second);
        state.jobs.erase(first);
        lock.unlock();
        job();
        job = nullptr;
        lock.lock();
      } else if (state.ended) {
        return;
      } else if (first == state.jobs.end()) {
        state.news.wait(lock);
      } else {
        state.news.wait_until(lock, Clock::time_point(first->first));
      }
    }
  }

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

Board::Board(const c10d::ProcessGroup& group, milliseconds how_long)
    : group_name(group.getGroupName()),
      rank(group.getRank()),
      size(group.getSize()),
      timeout(how_long),
      patience(timeout == milliseconds(0)
                   ? timing::kMostPatience
                   : std::clamp(timeout / 8, timing::kLeastPatience, timing::kMostPatience)),
      given_(group.getStore()) {
  ++boards;
  const StorePtr base = base_of(given_);
  if (dynamic_cast<c10d::TCPStore*>(base.get()) != nullptr ||
      dynamic_cast<c10d::HashStore*>(base.get()) != nullptr) {
    thread_ = StoreThread::of(base.get());
  } else {
    given_.reset();
  }
}

Board::~Board() { --boards; }

void Board::begin() {
  if (!has_store()) return;
  post([self = shared_from_this()](c10d::Store& store) {
    // A store that outlives a group may have seen an earlier group of this name, possibly with
    // fewer ranks, so the key includes the size and counts instances per rank.
    const std::string base = self->group_name + "/" + std::to_string(self->size);
    const std::string mine = "apex/introduced/" + base + "/" + std::to_string(self->rank);
    self->name_ = base + "/" + std::to_string(store.add(mine, 1));
    if (const auto process = this_process())
      append(store, self->key("process/" + process->host), self->rank, process->encode());
  });
  look_when_idle();
}

// --- calls of the store ---

void Board::run(const Body& body) {
  if (given_) {
    const StorePtr given = std::move(given_);
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
  if (has_store()) run_at(Clock::now(), [task] { (*task)(); });
  return future;  // without a store it holds a broken promise
}

void Board::run_at(Clock::time_point at, std::function<void()> job) {
  thread_->run_at(at, std::move(job));
}

// --- failures ---

std::shared_future<void> Board::report(const std::string& what, const Proof& proof) {
  RankRecord record;
  record.failure = what;
  record.proof = proof;
  has_failed_ = true;
  const char* const agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");  // torchrun's store
  if (rank == 0 && has_store() && (agent == nullptr || std::string(agent) != "True")) {
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

void Board::wake() {
  for (const auto& [other, process] : processes()) wake_process(process);
}

// --- polling ---

void Board::look_now() {
  if (!has_store() || look_is_queued_.exchange(true)) return;
  run_at(Clock::now(), [weak = weak_from_this()] {
    const auto board = weak.lock();
    if (!board) return;
    board->look_is_queued_ = false;
    board->look();
  });
}

void Board::look_if_older(milliseconds age) {
  if (Clock::now() - looked_.load() >= age) look_now();
}

void Board::look_when_idle() {
  const auto interval = timing::kIdle * std::max(1, boards.load());
  run_at(Clock::now() + interval, [weak = weak_from_this(), interval] {
    forget_destroyed_groups();
    const auto board = weak.lock();
    if (!board) return;
    // After a wait, the look that was due is left out: the job may have ended, and with it the
    // store.
    if (!board->answered_since(Clock::now() - interval) && board->may_look_when_idle())
      board->look();
    board->look_when_idle();
  });
}

void Board::look() {
  const auto began = Clock::now();
  looked_ = began;
  try {
    run([&](c10d::Store& store) {
      const int64_t news = store.add(key("news"), 0);
      RankRecords found;
      if (news != seen_) {
        for (const auto& [other, text] : read_appended(store, key("failed")))
          found[other] = RankRecord::decode(text);
        const int64_t asked = store.add(key("asked"), 0);
        if (asked != std::exchange(seen_asked_, asked)) {
          RankRecord mine = position(*this);
          mine.asked = asked;
          answered_elsewhere = !mine.waits;
          store.set(key("rank") + '/' + std::to_string(rank), mine.encode());
        }
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      if (news != std::exchange(seen_, news)) reports_ = std::move(found);
      answered_ = began;
    });
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    failed_ = Clock::now();
  }
  news_.notify_all();
}

void Board::wait_for_news(Clock::time_point until) {
  std::unique_lock<std::mutex> lock(mutex_);
  news_.wait_until(lock, until);
}

}  // namespace apex::parallel
