// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watched_group.h"

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <set>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "by_group.h"
#include "distributed/backends.h"
#include "plain_text.h"
#include "torch_version.h"
#include "watch/forced_unwind.h"
#include "watch/neighbours.h"
#include "watch/stall.h"
#include "watch/timing.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

using Clock = Board::Clock;
using std::chrono::milliseconds;

/// Never destroyed, since threads may outlive main().
struct Groups {
  std::mutex mutex;  ///< guards the rest
  ByGroup<WatchedGroupPtr> by_group;
};

Groups& groups() {
  static auto* const instance = new Groups;
  return *instance;
}

/// The options of the backend for the CPU, or else of NCCL; null for others.
c10::intrusive_ptr<c10d::Backend::Options> options_of(const c10d::ProcessGroup& given) {
  auto& group = const_cast<c10d::ProcessGroup&>(given);
  if (detail::has_backend(group, at::kCPU))
    return distributed::gloo_options(*group.getBackend(at::kCPU));
  if (!detail::has_backend(group, at::kCUDA)) return nullptr;
  try {
    return group.getBackend(at::kCUDA)->getBackendOptions();
  } catch (...) {
    return nullptr;  // not all backends have options
  }
}

/// Also finds an entry that the parent process made before a fork.
WatchedGroupPtr find_any(const c10d::ProcessGroup& group) {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  const WatchedGroupPtr* const found = groups().by_group.find(group);
  return found == nullptr ? nullptr : *found;
}

/// Drops the entries of groups that no longer exist, and with them connections to the store.
void forget_destroyed_groups() {
  std::vector<WatchedGroupPtr> gone;  // destroyed after the lock is released
  const std::lock_guard<std::mutex> lock(groups().mutex);
  gone = groups().by_group.take_gone();
}

/// The value of `key`, or "" if it is unset. Does not wait for the key.
std::string get_or_empty(c10d::Store& store, const std::string& key) {
  return store.check({key}) ? store.get_to_str(key) : std::string();
}

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

std::string note_on_ranks(const c10d::ProcessGroup& group) {
  const auto options = options_of(group);
  const std::vector<uint64_t> ranks =
      options ? options->global_ranks_in_group : std::vector<uint64_t>();
  bool same = true;
  std::string list;
  for (size_t i = 0; i < ranks.size(); ++i) {
    same = same && ranks[i] == i;
    list += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (same) return {};
  return "; these are ranks within the group, which consists of ranks " + list + " of the job";
}

WatchedGroupPtr find_watched(const c10d::ProcessGroup& group) {
  WatchedGroupPtr one = find_any(group);
  // A forked process is not a rank: its posts would be taken for its parent's.
  return one && one->pid == this_pid() ? one : nullptr;
}

WatchedGroupPtr watched(const c10d::ProcessGroup& group, const WatchedGroupPtr& parent,
                        const std::string& name) {
  if (group.getSize() == 1 || !group.getStore()) return nullptr;
  if (find_any(group)) return find_watched(group);
  const auto one = std::make_shared<WatchedGroup>();
  one->channel = parent ? name : group.getGroupName();
  one->note = note_on_ranks(group);
  if (parent) {
    one->board = parent->board;
  } else {
    const auto options = options_of(group);
    one->board = std::make_shared<Board>(group, options ? options->timeout : milliseconds(0));
    one->board->add_processes(launched_ranks(one->board->rank, one->board->size));
  }
  forget_destroyed_groups();
  {
    const std::lock_guard<std::mutex> lock(groups().mutex);
    if (!groups().by_group.find(group)) groups().by_group.put(group, one);
  }
  start_watching();
  return find_watched(group);  // another thread may have made it first
}

std::vector<WatchedGroupPtr> all_watched() {
  const std::lock_guard<std::mutex> lock(groups().mutex);
  return groups().by_group.values();
}

void step_boards() {
  std::set<std::shared_ptr<Board>> boards;
  for (const WatchedGroupPtr& group : all_watched()) boards.insert(group->board);
  for (const auto& board : boards) board->step();
  forget_destroyed_groups();
}

std::optional<Clock::time_point> waiting_since(const Board& board) {
  std::optional<Clock::time_point> since;
  for (const WatchedGroupPtr& group : all_watched()) {
    const std::lock_guard<std::mutex> lock(group->mutex);
    if (group->board.get() != &board || group->waits.empty()) continue;
    const auto first = group->waits.front()->since;
    if (!since || first < *since) since = first;
  }
  return since;
}

void watch_with(const c10d::ProcessGroup& group, const c10d::ProcessGroup& parent,
                const std::string& name) {
  if (&group == &parent) return;
  if (const WatchedGroupPtr known = watched(parent)) watched(group, known, name);
}

void remember_processes(const c10d::ProcessGroup& group,
                        const std::vector<ProcessName>& processes) {
  const auto self = this_process();
  const WatchedGroupPtr known = watched(group);
  if (!known || !self) return;
  std::map<int, ProcessName> here;
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    if (processes[rank].host == self->host) here.emplace(static_cast<int>(rank), processes[rank]);
  }
  known->board->add_processes(std::move(here));
}

void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept try {
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  const std::lock_guard<std::mutex> lock(one->mutex);
  one->calls.add(what);
  one->began = Clock::now();
  one->stall.clear();
} catch (...) {
  // A thread could not be created: an error of the collective names no other rank.
}

bool has_failed(const c10d::ProcessGroup& group) noexcept {
  const WatchedGroupPtr one = find_watched(group);
  return one && one->board->has_failed();
}

void announce_failure(const c10d::ProcessGroup& group, const std::string& what,
                      const std::string& cause) noexcept try {
  const WatchedGroupPtr one = watched(group);
  if (!one) return;
  RankRecord failure;
  failure.failure = what;
  failure.cause = cause;
  one->board->report(failure);
  one->board->wait_for_posts(Clock::now() + timing::kForOthers);  // this process may end now
} catch (...) {
  // The other ranks wait until their timeout.
}

void require_own_process(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr one = find_any(group);
  if (one && one->pid != this_pid()) throw_forked();
}

// --- the board ---

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
      given_(has_store ? group.getStore() : nullptr),
      looked_(Clock::now()),
      look_at_(looked_ + timing::kIdle * ++boards) {}

Board::~Board() { --boards; }

// --- the watching thread ---

void Board::step() try {
  if (has_store && !is_lost_) call_store();
} catch (APEX_FORCED_UNWIND) {
  throw;
} catch (...) {
  store_.reset();
  is_lost_ = true;
  const std::lock_guard<std::mutex> lock(mutex_);
  news_.notify_all();
}

void Board::call_store() {
  if (given_) introduce();
  std::unique_lock<std::mutex> lock(mutex_);
  const bool posts = !unsent_.empty();
  for (; !unsent_.empty(); unsent_.pop_front()) {
    const std::string text = unsent_.front();
    lock.unlock();
    append(*store_, key("failed"), rank, text);
    store_->add(key("news"), 1);  // last, so that a rank that sees the count finds the report
    lock.lock();
  }
  const auto now = Clock::now();
  const bool looks = now >= look_at_;
  if (looks) {
    looked_ = now;
    look_at_ = now + timing::kIdle * boards.load();
  }
  lock.unlock();
  if (posts) {
    find_processes();
    wake();
  }
  const auto waits = waiting_since(*this);
  // A process that has ended may have hosted the store, and torch logs every call of a lost store.
  if (looks && (waits || has_failed_ || look_around(ProcessState::kEnded).empty())) {
    read_news();
    answered_ = now;
  }
  if (elsewhere_ && waits && now - *waits > timing::kLook) publish();
  watch_waits(*this);
  lock.lock();
  news_.notify_all();
}

void Board::introduce() {
  store_ = std::exchange(given_, nullptr)->clone();
  // A store that outlives a group may have seen an earlier group of this name, possibly with fewer
  // ranks, so the key includes the size and counts instances per rank.
  const std::string base = group_name + "/" + std::to_string(size);
  name_ = base + "/" +
          std::to_string(store_->add("apex/introduced/" + base + "/" + std::to_string(rank), 1));
  if (const auto process = this_process())
    append(*store_, key("process/" + process->host), rank, process->encode());
}

void Board::read_news() {
  const int64_t news = store_->add(key("news"), 0);
  if (news == seen_) return;
  seen_ = news;
  RankRecords found;
  for (const auto& [other, text] : read_appended(*store_, key("failed")))
    found[other] = RankRecord::decode(text);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reports_ = std::move(found);
  }
  const int64_t asked = store_->add(key("asked"), 0);
  if (asked != std::exchange(asked_, asked)) publish();
}

/// Writes where this rank is.
void Board::publish() {
  RankRecord mine = position(*this);
  mine.asked = asked_;
  elsewhere_ = !mine.waits;
  store_->set(key("rank/" + std::to_string(rank)), mine.encode());
}

std::optional<RankRecord> Board::position_of(int of_rank) {
  const std::string text = get_or_empty(*store_, key("rank/" + std::to_string(of_rank)));
  return text.empty() ? std::nullopt : std::optional<RankRecord>(RankRecord::decode(text));
}

int64_t Board::ask() {
  asked_ = store_->add(key("asked"), 1);
  publish();
  store_->add(key("news"), 1);
  find_processes();
  wake();
  return asked_;
}

// --- other threads ---

void Board::look_if_older(milliseconds age) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = Clock::now();
  if (now < looked_ + age) return;
  look_at_ = now;
  wake_watcher();
}

void Board::wait_for_news(Clock::time_point until) {
  std::unique_lock<std::mutex> lock(mutex_);
  news_.wait_until(lock, until);
}

void Board::wait_for_posts(Clock::time_point until) {
  std::unique_lock<std::mutex> lock(mutex_);
  news_.wait_until(lock, until, [this] { return unsent_.empty() || is_lost_; });
}

void Board::report(const RankRecord& failure) {
  has_failed_ = true;
  if (!has_store) return;
  const char* const agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");  // torchrun's store
  if (rank == 0 && (agent == nullptr || std::string(agent) != "True")) {
    static const int at_exit = std::atexit(stay_for_readers);
    if (at_exit == 0) stays_until = Clock::now() + timing::kStays;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  unsent_.push_back(failure.encode());
  wake_watcher();
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

/// Reads those that are published, if none is known.
void Board::find_processes() {
  const auto self = this_process();
  if (!self || !processes().empty()) return;
  std::map<int, ProcessName> found;
  for (const auto& [other, text] : read_appended(*store_, key("process/" + self->host))) {
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
