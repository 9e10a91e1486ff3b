// SPDX-License-Identifier: BSD-3-Clause
#include <support/race_detector.h>

#include <algorithm>
#include <utility>

namespace apex::testing {
namespace {

/// One mistake causes a race in every step; only the first reports are useful.
constexpr size_t kMaxErrors = 100;

using Lock = std::lock_guard<std::mutex>;

void merge(RaceDetector::Clock& into, const RaceDetector::Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

int64_t entry(const RaceDetector::Clock& clock, RaceDetector::Stream stream) {
  return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

}  // namespace

RaceDetector::Stream RaceDetector::new_stream(std::string name) {
  const Lock lock(mutex_);
  names_.push_back(std::move(name));
  clocks_.emplace_back();
  return static_cast<Stream>(names_.size()) - 1;
}

const std::string& RaceDetector::name(Stream stream) const {
  const Lock lock(mutex_);
  return names_.at(stream);
}

RaceDetector::Block RaceDetector::allocate(Stream owner) {
  const Lock lock(mutex_);
  const Block block = next_block_++;
  blocks_[block] = {owner, ++now_, {}, {}};
  return block;
}

void RaceDetector::free(Block block) {
  const Lock lock(mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) return;
  BlockState& state = found->second;
  // The owner reuses the memory when the registered streams have reached this point.
  Clock known = clocks_[state.owner];
  merge(known, host_);
  for (const Stream stream : state.told) merge(known, clocks_[stream]);
  ++now_;
  for (Use& use : state.uses) {
    if (!knows(known, use)) ghosts_[state.owner].push_back({now_, std::move(use)});
  }
  blocks_.erase(found);
}

void RaceDetector::used_on(Block block, Stream stream) {
  const Lock lock(mutex_);
  const auto found = blocks_.find(block);
  if (found != blocks_.end()) found->second.told.insert(stream);
}

bool RaceDetector::knows(const Clock& clock, const Use& use) const {
  return entry(clock, use.stream) >= use.time;
}

void RaceDetector::report(std::string error) {
  if (errors_.size() < kMaxErrors) errors_.push_back(std::move(error));
}

void RaceDetector::check_reuse(Stream stream, const std::string& what, const BlockState& block) {
  const auto found = ghosts_.find(block.owner);
  if (found == ghosts_.end()) return;
  auto& ghosts = found->second;
  const auto settled = [&](const Ghost& ghost) {
    if (ghost.freed > block.born) return false;
    if (knows(clocks_[stream], ghost.use)) return stream == block.owner;
    report(what + " on stream '" + names_[stream] +
           "' writes to memory that may be that of a freed tensor "
           "of stream '" +
           names_[block.owner] + "', with which " + ghost.use.what + " on stream '" +
           names_[ghost.use.stream] + "' need not be done: record_stream() is missing");
    return true;
  };
  ghosts.erase(std::remove_if(ghosts.begin(), ghosts.end(), settled), ghosts.end());
}

void RaceDetector::operate(Stream stream, const std::string& what,
                           const std::vector<Access>& accesses) {
  const Lock lock(mutex_);
  Clock& clock = clocks_.at(stream);
  merge(clock, host_);
  if (clock.size() <= static_cast<size_t>(stream)) clock.resize(stream + 1, 0);
  const int64_t time = ++clock[stream];
  ++operations_;
  for (const Access& access : accesses) {
    const auto found = blocks_.find(access.block);
    if (found == blocks_.end() || access.begin >= access.end) continue;
    BlockState& block = found->second;
    if (access.writes) check_reuse(stream, what, block);
    const auto superseded = [&](const Use& use) {
      if (use.end <= access.begin || access.end <= use.begin) return false;
      const bool known = knows(clock, use);
      if (!known && (use.writes || access.writes)) {
        report(what + " on stream '" + names_[stream] + "' " +
               (access.writes ? "writes" : "reads") + " what " + use.what + " on stream '" +
               names_[use.stream] + "' " + (use.writes ? "writes" : "reads") +
               ", without waiting for it");
      }
      // An operation ordered after this access is also ordered after earlier covered accesses.
      const bool covered = access.begin <= use.begin && use.end <= access.end;
      return covered && known && (access.writes || (!use.writes && use.stream == stream));
    };
    auto& uses = block.uses;
    uses.erase(std::remove_if(uses.begin(), uses.end(), superseded), uses.end());
    uses.push_back({stream, time, access.begin, access.end, access.writes, what});
  }
}

RaceDetector::Clock RaceDetector::record(Stream stream) const {
  const Lock lock(mutex_);
  return clocks_.at(stream);
}

void RaceDetector::wait(Stream stream, const Clock& clock) {
  const Lock lock(mutex_);
  merge(clocks_.at(stream), clock);
}

void RaceDetector::host_waits(const Clock& clock, const std::string& what) {
  const Lock lock(mutex_);
  merge(host_, clock);
  host_waits_.push_back(what);
}

bool RaceDetector::host_knows(const Clock& clock) const {
  const Lock lock(mutex_);
  for (size_t i = 0; i < clock.size(); ++i) {
    if (entry(host_, static_cast<Stream>(i)) < clock[i]) return false;
  }
  return true;
}

void RaceDetector::fail(std::string error) {
  const Lock lock(mutex_);
  report(std::move(error));
}

std::vector<std::string> RaceDetector::errors() const {
  const Lock lock(mutex_);
  return errors_;
}

std::vector<std::string> RaceDetector::host_waits() const {
  const Lock lock(mutex_);
  return host_waits_;
}

int64_t RaceDetector::operations() const {
  const Lock lock(mutex_);
  return operations_;
}

void RaceDetector::reset() {
  const Lock lock(mutex_);
  for (const Clock& clock : clocks_) merge(host_, clock);
  ghosts_.clear();
  errors_.clear();
  host_waits_.clear();
  operations_ = 0;
}

}  // namespace apex::testing
