// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "transport/host_channel.h"
#include "transport/host_protocol.h"
#include "transport/host_sum.h"

// Makes progress on the collectives in flight.

namespace apex::parallel {

namespace {

/// Minimum size of a share of an all-reduce, unless there are more ranks than such shares.
constexpr int64_t kShareBytes = int64_t{256} << 10;

const char* text_of(c10d::ReduceOp::RedOpType op) {
  static constexpr const char* kNames[] = {"sum",     "average",     "product",    "minimum",
                                           "maximum", "bitwise and", "bitwise or", "bitwise xor"};
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "another operation";
}

}  // namespace

bool HostChannel::all_posted(uint64_t number) const {
  return std::all_of(controls_.begin(), controls_.end(),
                     [&](const Control* one) { return one->posted.load() > number; });
}

bool HostChannel::all_finished(uint64_t number) const {
  return std::all_of(controls_.begin(), controls_.end(),
                     [&](const Control* one) { return one->finished.load() > number; });
}

/// Posts issued collectives as far as the ring has free slots. A slot may be read until all ranks
/// have finished with its collective.
void HostChannel::post_issued() {
  Control& mine = *controls_[rank_];
  for (uint64_t number = mine.posted.load(); number < next_; ++number) {
    if (number >= kRing && !all_finished(number - kRing)) return;
    Operation& operation = *pending_[pending_.size() - static_cast<size_t>(next_ - number)];
    const uint64_t slot = number % kRing;
    mine.ring[slot] = *operation.message;
    operation.message.reset();
    mine.handed_over[slot / 64].fetch_and(~(uint64_t{1} << slot % 64));
    if (rank_ == 0) {
      for (auto& claim : common_->slots[slot].claims) claim.store(0, std::memory_order_relaxed);
      common_->slots[slot].done.store(0, std::memory_order_relaxed);
    }
    APEX_HOST_STEP("described");
    mine.posted.store(number + 1);
    APEX_HOST_STEP("posted");
    common_->event.notify();
  }
}

/// Does the work that this rank can do now.
/// @param helps  also claim shares of other ranks' parts.
void HostChannel::advance(bool helps) {
  post_issued();
  bool in_order = true;  // all earlier collectives are finished
  for (auto next = pending_.begin(); next != pending_.end();) {
    Operation& operation = **next;
    if (!operation.begun) {
      if (!all_posted(operation.number)) return;
      APEX_HOST_STEP("all are here");
      begin(operation);
      operation.begun = true;
    }
    if (operation.kind == HostKind::kSumShares && !operation.completed) {
      sum_shares(operation, helps);
      if (all_shares_done(operation)) {
        APEX_HOST_STEP("all shares are done");
        take_result(operation);
        complete(operation);
      }
    }
    in_order = in_order && (operation.kind != HostKind::kSumShares || operation.completed);
    next = finish(operation, in_order) ? pending_.erase(next) : std::next(next);
  }
}

/// Publishes that this rank is finished with the collective; returns whether it may be deleted.
bool HostChannel::finish(Operation& operation, bool in_order) {
  if (!in_order) return false;
  std::atomic<uint64_t>& finished = controls_[rank_]->finished;
  if (finished.load() <= operation.number) {
    finished.store(operation.number + 1);
    APEX_HOST_STEP("finished");
    common_->event.notify();
  }
  // Peers read a copy until they have finished.
  if (operation.staged && !all_finished(operation.number)) return false;
  complete(operation);
  return true;
}

/// The result is complete, and no peer uses this rank's memory any more.
void HostChannel::complete(Operation& operation) {
  operation.completed = true;
  released_.push_back(std::move(operation.output));
  for (at::Tensor& part : operation.parts) released_.push_back(std::move(part));
  operation.parts.clear();
  operation.staged.reset();
}

/// Called once all ranks have posted it.
void HostChannel::begin(Operation& operation) {
  check_messages(operation);
  try {
    if (operation.kind == HostKind::kSumShares) {
      // If other ranks have done all shares, they may have exited since.
      if (!all_shares_done(operation)) find_messages(operation);
    } else {
      read_messages(operation);
    }
  } catch (const std::exception& error) {
    if (!failure_.empty()) throw;
    // Most likely because the owner of the memory has exited.
    const std::string ended = ended_process();
    fail(ended.empty() ? error.what() : ended);
  }
}

const HostChannel::Message& HostChannel::message_of(int rank, uint64_t number) const {
  return controls_[rank]->ring[number % kRing];
}

void HostChannel::check_messages(const Operation& operation) {
  const Message& mine = message_of(rank_, operation.number);
  for (int peer = 0; peer < size_; ++peer) {
    const Message& other = message_of(peer, operation.number);
    const std::string said(other.what, ::strnlen(other.what, sizeof(other.what)));
    const std::string texts = "the ranks are in different collectives: " + name_of(rank_) +
                              " is in: " + operation.what + ", while " + name_of(peer) +
                              " is in: " + said;
    if (std::strncmp(other.what, mine.what, sizeof(mine.what)) != 0) fail(texts);
    // The kind is determined by these fields.
    if (other.dtype != mine.dtype || other.numel != mine.numel || other.op != mine.op ||
        other.root != mine.root) {
      const auto details = [](const Message& message) {
        return std::to_string(message.numel) + " elements of " + c10::toString(message.dtype) +
               ", " + text_of(message.op) + ", root " + std::to_string(message.root);
      };
      fail(texts + " (here " + details(mine) + "; there " + details(other) + ")");
    }
    if (other.kind != mine.kind) fail(texts);
  }
}

/// Copies what this rank needs from the messages.
void HostChannel::read_messages(Operation& operation) {
  if (!has_one_reader(operation.kind) || operation.root == rank_) {
    std::vector<char*> from;
    for (int peer = 0; peer < size_; ++peer) {
      const HostPlace& place = message_of(peer, operation.number).place;
      if (has_one_source(operation.kind) && peer != operation.root) {
        from.push_back(nullptr);
      } else {
        from.push_back(peer == rank_ ? operation.staged.get() : peers_[peer].memory->at(place));
      }
    }
    take_message(operation, from);
  }
  // A message outside the first block is mapped when it is first read, which requires that this
  // process is alive. Such a collective completes only when all ranks have finished.
  operation.completed = !operation.staged || message_of(rank_, operation.number).place.block == 0;
}

/// @param from  messages by rank; null for messages that are not read.
void HostChannel::take_message(Operation& operation, const std::vector<char*>& from) {
  const at::Tensor& output = operation.output;
  char* out = output.defined() ? static_cast<char*>(output.mutable_data_ptr()) : nullptr;
  const size_t bytes = output.defined() ? output.nbytes() : 0;
  switch (operation.kind) {
    case HostKind::kSumWhole:
    case HostKind::kReduce:
      sum_whole(operation, from);
      break;
    case HostKind::kReduceScatter: {
      std::vector<const char*> shares;
      for (const char* message : from)
        shares.push_back(message + bytes * static_cast<size_t>(rank_));
      combine(operation.op, output.scalar_type(), output.numel(), shares, {out});
      break;
    }
    case HostKind::kBroadcast:
      if (operation.root != rank_) take_parts(operation, from[operation.root]);
      break;
    case HostKind::kScatter:
      if (operation.root == rank_) break;  // the root has its share already
      copy_bytes(out, from[operation.root] + bytes * (rank_ - (rank_ > operation.root)), bytes);
      break;
    case HostKind::kAllGather:
    case HostKind::kGather:
      for (size_t peer = 0; peer < from.size(); ++peer) {
        const bool one = operation.parts.size() == 1;
        const at::Tensor& to = operation.parts[one ? 0 : peer];
        const size_t share = to.nbytes() / (one ? from.size() : 1);
        copy_bytes(static_cast<char*>(to.mutable_data_ptr()) + (one ? share * peer : 0), from[peer],
                   share);
      }
      break;
    case HostKind::kAllToAll:
      for (int peer = 0; peer < size_; ++peer) {
        const auto* lengths = reinterpret_cast<const int64_t*>(from[peer]);
        const char* data = from[peer] + sizeof(int64_t) * static_cast<size_t>(size_);
        for (int before = 0; before < rank_; ++before) data += before == peer ? 0 : lengths[before];
        const int64_t expected = operation.received[peer];
        if (lengths[rank_] != expected) {
          fail(operation.what + ": " + name_of(peer) + " sends " + std::to_string(lengths[rank_]) +
               " bytes, but this rank expects " + std::to_string(expected));
        }
        if (peer != rank_) copy_bytes(out, data, static_cast<size_t>(expected));
        out += expected;
      }
      break;
    case HostKind::kSumShares:
      break;
  }
}

void HostChannel::sum_whole(const Operation& operation, const std::vector<char*>& from) const {
  const at::Tensor& output = operation.output;
  combine(operation.op, output.scalar_type(), output.numel(), {from.begin(), from.end()},
          {static_cast<char*>(output.mutable_data_ptr())});
}

void HostChannel::take_parts(const Operation& operation, const char* message) {
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    const at::Tensor& part = operation.parts[i];
    void* const to = part.mutable_data_ptr();
    const size_t bytes = part.nbytes();
    const bool differs = bytes > 0 && (!operation.changed || std::memcmp(to, message, bytes) != 0);
    if (differs) copy_bytes(to, message, bytes);
    if (operation.changed) (*operation.changed)[i] = static_cast<uint8_t>(differs);
    message += bytes;
  }
}

void HostChannel::find_messages(Operation& operation) {
  char* const mine = operation.staged ? operation.staged.get()
                                      : static_cast<char*>(operation.output.mutable_data_ptr());
  for (int peer = 0; peer < size_; ++peer) {
    const HostPlace& place = message_of(peer, operation.number).place;
    operation.messages.push_back(peer == rank_ ? mine : peers_[peer].memory->at(place));
  }
  APEX_HOST_STEP("messages mapped");
}

bool HostChannel::all_shares_done(const Operation& operation) const {
  const uint32_t done = common_->slots[operation.number % kRing].done.load();
  return done == static_cast<uint32_t>(shares_of(operation));
}

/// Every rank's part has the same number of shares.
int HostChannel::shares_of(const Operation& operation) const {
  const auto wanted = static_cast<int>(std::min<int64_t>(kShares, operation.bytes / kShareBytes));
  return std::max(1, wanted / size_) * size_;
}

/// Byte range [begin, end) of a message that belongs to a rank, in whole cache lines.
std::pair<int64_t, int64_t> HostChannel::part_of(int rank, int64_t bytes) const {
  const auto line = static_cast<int64_t>(kCacheLine);
  const int64_t part = (bytes / size_ + line - 1) / line * line;
  return {std::min(bytes, part * rank),
          rank + 1 == size_ ? bytes : std::min(bytes, part * (rank + 1))};
}

bool HostChannel::keeps_part(int rank, const Operation& operation) const {
  if (rank == rank_) return operation.keeps_part;
  const uint64_t slot = operation.number % kRing;
  const uint64_t bit = uint64_t{1} << slot % 64;
  return message_of(rank, operation.number).keeps_part &&
         (controls_[rank]->handed_over[slot / 64].load() & bit) == 0;
}

/// Claims shares and sums them: shares of this rank's part, and with `helps` of all parts.
void HostChannel::sum_shares(Operation& operation, bool helps) {
  Common::Slot& slot = common_->slots[operation.number % kRing];
  const int shares = shares_of(operation);
  const int each = shares / size_;
  for (int i = 0; i < (helps ? shares : each); ++i) {
    const int share = (rank_ * each + i) % shares;
    const int owner = share / each;
    if (owner != rank_ && keeps_part(owner, operation)) continue;
    uint8_t nobody = 0;
    if (!slot.claims[share].compare_exchange_strong(nobody, static_cast<uint8_t>(rank_ + 1)))
      continue;
    APEX_HOST_STEP("claimed");
    sum_share(share, operation);
    APEX_HOST_STEP("summed");
    slot.claims[share].fetch_or(kDone);
    slot.done.fetch_add(1);
    common_->event.notify();
  }
}

void HostChannel::sum_share(int share, const Operation& operation) const {
  const int each = shares_of(operation) / size_;
  const auto [part_begin, part_end] = part_of(share / each, operation.bytes);
  const auto line = static_cast<int64_t>(kCacheLine);
  const int64_t length = ((part_end - part_begin) / each + line - 1) / line * line;
  const int64_t begin = std::min(part_end, part_begin + share % each * length);
  const int64_t end = share % each + 1 == each ? part_end : std::min(part_end, begin + length);
  std::vector<char*> at;
  for (char* message : operation.messages) at.push_back(message + begin);
  const at::Tensor& tensor = operation.output;
  if (operation.keeps_part && share / each == rank_)
    at[rank_] = static_cast<char*>(tensor.mutable_data_ptr()) + begin;
  combine(operation.op, tensor.scalar_type(), (end - begin) / tensor.element_size(),
          {at.begin(), at.end()}, at);
}

/// Copies the result back from the staged copy, except for a part that was kept.
void HostChannel::take_result(const Operation& operation) const {
  if (!operation.staged) return;
  char* const data = static_cast<char*>(operation.output.mutable_data_ptr());
  const char* const copy = operation.staged.get();
  const int64_t bytes = operation.bytes;
  const auto [begin, end] = operation.keeps_part ? part_of(rank_, bytes) : std::pair(bytes, bytes);
  copy_bytes(data, copy, static_cast<size_t>(begin));
  copy_bytes(data + end, copy + end, static_cast<size_t>(bytes - end));
}

/// Lets others sum this rank's part.
void HostChannel::hand_over(Operation& operation) {
  if (operation.completed || !operation.keeps_part) return;
  const auto [begin, end] = part_of(rank_, operation.bytes);
  const char* const data = static_cast<const char*>(operation.output.const_data_ptr());
  // Shares of it that are already summed are copied as well.
  copy_bytes(operation.staged.get() + begin, data + begin, static_cast<size_t>(end - begin));
  operation.keeps_part = false;
  if (operation.message) {  // peers read the flag there
    operation.message->keeps_part = false;
    return;
  }
  const uint64_t slot = operation.number % kRing;
  controls_[rank_]->handed_over[slot / 64].fetch_or(uint64_t{1} << slot % 64);
  APEX_HOST_STEP("handed over");
  common_->event.notify();
}

}  // namespace apex::parallel
