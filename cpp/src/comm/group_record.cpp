// SPDX-License-Identifier: BSD-3-Clause
#include "comm/group_record.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <apex/error.h>

#include "comm/bounded_call.h"
#include "comm/by_group.h"
#include "distributed/backends.h"
#include "torch_version.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kMostPatience{5000};
constexpr milliseconds kLeastPatience{500};

/// Never destroyed, as threads may be left behind.
struct Records {
  std::mutex introduction;  ///< held while a record introduces itself, which waits for the store
  std::mutex mutex;         ///< guards what follows
  ByGroup<GroupRecordPtr> by_group;
  ByGroup<int64_t> makers;  ///< the process that made it
};

Records& records() {
  static auto* const instance = new Records;
  return *instance;
}

GroupRecordPtr introduce_to(const c10d::ProcessGroup& group, const StorePtr& store) {
  const auto record = std::make_shared<GroupRecord>();
  record->pid = this_pid();
  record->rank = group.getRank();
  record->size = group.getSize();
  record->store = c10::weak_intrusive_ptr<c10d::Store>(store);
  // A group of this name may have been there before, on a store that outlives it.
  const auto named = std::make_shared<GroupRecord>();
  const bool told = talk_to_store(
      group, *record,
      [named, rank = record->rank, group_name = group.getGroupName()](c10d::Store& shared) {
        const int64_t times =
            shared.add("apex/introduced/" + group_name + "/" + std::to_string(rank), 1);
        named->name = group_name + "/" + std::to_string(times);
        if (const auto process = this_process())
          named->process_board(process->host).post(shared, rank, process->encode());
      });
  if (told) record->name = named->name;
  return record;
}

}  // namespace

NoticeBoard GroupRecord::process_board(const std::string& host) const {
  return NoticeBoard("apex/process/" + name + "/" + host);
}

NoticeBoard GroupRecord::report_board() const { return NoticeBoard("apex/failure/" + name); }

std::string GroupRecord::count_key() const { return "apex/failure/" + name + "/count"; }

std::string GroupRecord::refusal_key(int64_t call) const {
  return "apex/refused/" + name + "/" + std::to_string(call);
}

std::string GroupRecord::farewell_key(int of_rank) const {
  return "apex/failure/" + name + "/" + std::to_string(of_rank) + "/left";
}

NoticeBoard GroupRecord::hook_board() const {
  return NoticeBoard("apex/hook/" + name + "/" + std::to_string(hooks_failed.load()));
}

milliseconds GroupRecord::between_looks() const {
  // 1,000 ranks that look make some 10,000 requests a second.
  return std::max(milliseconds(20), milliseconds(size / 5));
}

namespace {

/// Also one of the process that this one was forked from.
GroupRecordPtr any_record(const c10d::ProcessGroup& group) {
  const std::lock_guard<std::mutex> lock(records().mutex);
  const GroupRecordPtr* const found = records().by_group.find(group);
  return found == nullptr ? nullptr : *found;
}

/// A forked process is no rank: what it says would be taken for its parent's word.
GroupRecordPtr if_own(GroupRecordPtr record) {
  return record && record->pid == this_pid() ? std::move(record) : nullptr;
}

}  // namespace

GroupRecordPtr find_record(const c10d::ProcessGroup& group) { return if_own(any_record(group)); }

GroupRecordPtr record_of(const c10d::ProcessGroup& group) {
  if (group.getSize() == 1) return nullptr;
  if (auto record = any_record(group)) return if_own(std::move(record));
  const StorePtr store = group.getStore();
  if (!store) return nullptr;
  const std::lock_guard<std::mutex> introduction(records().introduction);
  if (auto record = any_record(group)) return if_own(std::move(record));
  GroupRecordPtr record = introduce_to(group, store);
  std::vector<GroupRecordPtr> gone;  // outlives the lock
  const std::lock_guard<std::mutex> lock(records().mutex);
  gone = records().by_group.take_gone();
  records().by_group.put(group, record);
  return record;
}

void made_here(const c10d::ProcessGroup& group) {
  const std::lock_guard<std::mutex> lock(records().mutex);
  records().makers.take_gone();
  records().makers.put(group, this_pid());
}

void require_own_process(const c10d::ProcessGroup& group) {
  {
    const std::lock_guard<std::mutex> lock(records().mutex);
    const GroupRecordPtr* const record = records().by_group.find(group);
    const int64_t* const maker = records().makers.find(group);
    if ((maker == nullptr || *maker == this_pid()) &&
        (record == nullptr || (*record)->pid == this_pid()))
      return;
  }
  throw Error(
      "this process was forked from the one that made the communicator, and is no rank of it: make "
      "process groups and wrappers after the fork");
}

milliseconds patience_of(const c10d::ProcessGroup& group) {
  std::optional<milliseconds> timeout;
  auto& mutable_group = const_cast<c10d::ProcessGroup&>(group);
  if (detail::has_backend(mutable_group, at::kCPU)) {
    timeout = distributed::gloo_timeout(*mutable_group.getBackend(at::kCPU));
  }
  return timeout ? std::clamp(*timeout / 8, kLeastPatience, kMostPatience) : kMostPatience;
}

bool talk_to_store(const c10d::ProcessGroup& group, const GroupRecord& record,
                   std::function<void(c10d::Store& store)> body) {
  const StorePtr store = record.store.lock();
  if (!store) return false;
  BoundedCall call([store, body = std::move(body)](const std::atomic<bool>&) { body(*store); });
  return call.wait_until(Clock::now() + patience_of(group));
}

StorePtr own_connection(const StorePtr& store) {
  const c10d::Store* base = store.get();
  while (const auto* const prefixed = dynamic_cast<const c10d::PrefixStore*>(base)) {
    base = const_cast<c10d::PrefixStore*>(prefixed)->getUnderlyingStore().get();
  }
  return dynamic_cast<const c10d::TCPStore*>(base) != nullptr ? store->clone() : store;
}

void read_processes(c10d::Store& store, GroupRecord& record) {
  std::map<int, ProcessName> found;
  const auto self = this_process();
  if (!self) return;
  for (const auto& [rank, text] : record.process_board(self->host).read(store)) {
    if (rank == record.rank) continue;
    if (auto process = ProcessName::decode(text)) found.emplace(rank, std::move(*process));
  }
  const std::lock_guard<std::mutex> lock(record.mutex);
  record.processes = std::move(found);
}

std::map<int, std::string> look_around(GroupRecord& record, std::optional<ProcessState> only) {
  std::map<int, ProcessName> processes;
  {
    const std::lock_guard<std::mutex> lock(record.mutex);
    processes = record.processes;
  }
  std::map<int, std::string> proof;
  for (const auto& [rank, process] : processes) {
    const std::string name = "process " + std::to_string(process.pid);
    const ProcessState state = state_of(process);
    if (only && state != *only) continue;
    if (state == ProcessState::kEnded) proof[rank] = "has ended (" + name + ")";
    if (state == ProcessState::kStopped)
      proof[rank] = "is stopped (" + name + ", by a signal or a debugger)";
  }
  return proof;
}

}  // namespace apex::parallel
