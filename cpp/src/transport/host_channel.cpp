// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_channel.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <thread>
#include <type_traits>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <apex/error.h>

#include "error_text.h"
#include "plain_text.h"
#include "transport/host_sum.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;

/// Up to this size every rank sums the whole message: one exchange instead of two.
constexpr int64_t kWhole = int64_t{16} << 10;
/// How long a rank that waits spins before it sleeps, if there is a processor for each rank.
constexpr microseconds kSpin{50};
/// How long a thread that waits spins for ranks that do their parts of a sum.
constexpr microseconds kSpinForParts{100};

int processors() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

const char* text_of(Op op) {
  static constexpr const char* kNames[] = {"sum",     "average",     "product",    "minimum",
                                           "maximum", "bitwise and", "bitwise or", "bitwise xor"};
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "another operation";
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

/// An empty tensor may have a null address.
void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

/// A rank's description of a collective. In shared memory.
struct HostChannel::Message {
  Kind kind = Kind::kSumWhole;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  at::ScalarType dtype = at::kByte;
  int32_t root = 0;     ///< of a broadcast
  int64_t numel = 0;    ///< must be the same on all ranks
  uint64_t offset = 0;  ///< of the message in the rank's memory
  char what[168] = {};
};

/// At kReservedAt in each rank's memory; written by that rank. After rank 0's follows the event of
/// all ranks.
struct HostChannel::Control {
  alignas(kCacheLine) std::atomic<uint64_t> posted{0};  ///< number of collectives posted
  alignas(kCacheLine) std::atomic<uint64_t> done{0};    ///< those whose messages it needs no more
  std::atomic<End> end{End::kNone};
  char why[256] = {};  ///< error message if the rank has failed; written before `end`
  alignas(kCacheLine) Message slots[2];
};

/// A collective of this rank.
struct HostChannel::Operation final : HostJob {
  enum class Phase : uint8_t { kIssued, kPosted, kDone };

  bool advance(std::chrono::microseconds spin) override { return channel->advance(*this, spin); }
  std::function<void(std::chrono::milliseconds)> sleeper() override {
    return [event = channel->event_, keeps = channel, count = seen](std::chrono::milliseconds nap) {
      event->wait(count, nap);
    };
  }
  void check_ranks(bool processes) override { channel->check_ranks(processes, this); }
  std::string awaited() const override { return channel->awaited(*this); }

  std::shared_ptr<HostChannel> channel;
  std::string what;
  Message message;
  std::vector<at::Tensor> sent;   ///< consecutive in the message
  at::Tensor output;              ///< kept alive, and written
  std::vector<at::Tensor> parts;  ///< also kept alive and written by a gather: one per rank

  Phase phase = Phase::kIssued;
  uint64_t number = 0;
  bool copied = false;          ///< its message is a copy; peers see no other memory of this rank
  std::vector<char*> messages;  ///< by rank; in a broadcast only the root's is one
  uint32_t seen = 0;            ///< count of the event before the last look at the other ranks
};

std::shared_ptr<HostMemory> HostChannel::make_memory(size_t bytes) {
  static_assert(std::is_trivially_copyable_v<Message> &&
                std::atomic<uint64_t>::is_always_lock_free);
  static_assert(sizeof(Control) % alignof(FutexEvent) == 0 && kReservedAt % alignof(Control) == 0);
  auto memory = HostMemory::create(bytes, sizeof(Control) + sizeof(FutexEvent));
  char* const reserved = memory->data() + kReservedAt;
  new (reserved) Control;
  new (reserved + sizeof(Control)) FutexEvent;
  return memory;
}

HostChannel::HostChannel(int rank, std::shared_ptr<HostMemory> memory, std::vector<Peer> peers,
                         milliseconds timeout)
    : rank_(rank),
      size_(static_cast<int>(peers.size())),
      memory_(std::move(memory)),
      queue_(HostQueue::make(timeout, size_ <= processors() ? kSpin : microseconds(0),
                             [this](const std::string& why) { tell_end(End::kFailed, why); })),
      peers_(std::move(peers)) {
  for (int peer = 0; peer < size_; ++peer) {
    char* const reserved = memory_of(peer) + kReservedAt;
    controls_.push_back(reinterpret_cast<Control*>(reserved));
    if (peer == 0) event_ = reinterpret_cast<FutexEvent*>(reserved + sizeof(Control));
  }
}

HostChannel::~HostChannel() {
  if (!queue_->is_own()) return;
  if (queue_->close()) tell_end(End::kLeft, "");
}

bool HostChannel::can_all_reduce(const at::Tensor& tensor, Op op) {
  if (tensor.is_complex()) return op == Op::SUM || op == Op::AVG;
  return can_combine(op, tensor.scalar_type());
}

at::Tensor HostChannel::allocate(int64_t numel, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  std::shared_ptr<char> memory = memory_->allocate_zeroed(bytes);
  void* const data = memory.get();
  return at::from_blob(
      data, {numel}, [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
}

/// A collective in which each rank's message has the size and dtype of `each`; undefined: any.
HostChannel::OperationPtr HostChannel::describe(const std::string& what, Kind kind,
                                                const at::Tensor& each) {
  auto operation = std::make_shared<Operation>();
  operation->channel = shared_from_this();
  operation->what = what;
  Message& message = operation->message;
  message.kind = kind;
  if (each.defined()) {
    message.dtype = each.scalar_type();
    message.numel = each.numel();
  }
  const std::string said = in_common(what);
  copy_bytes(message.what, said.data(), character_before(said, sizeof(message.what) - 1));
  return operation;
}

HostChannel::OperationPtr HostChannel::describe_reduction(const std::string& what, Kind kind,
                                                          const at::Tensor& received,
                                                          std::vector<at::Tensor> sent, Op op) {
  const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
  const at::Tensor real = received.is_complex() ? at::view_as_real(received) : received;
  auto operation = describe(what, kind, real);
  operation->message.op = op;
  operation->sent = std::move(sent);
  operation->output = real;
  return operation;
}

HostChannel::JobPtr HostChannel::summing(const std::string& what, const at::Tensor& tensor, Op op) {
  const bool whole = static_cast<int64_t>(tensor.nbytes()) <= kWhole;
  return describe_reduction(what, whole ? Kind::kSumWhole : Kind::kSumParts, tensor, {tensor}, op);
}

HostChannel::WorkPtr HostChannel::all_reduce(HostCall call, const at::Tensor& tensor, Op op) {
  JobPtr job = summing(call.what, tensor, op);
  return issue(std::move(call), std::move(job));
}

HostChannel::WorkPtr HostChannel::reduce_scatter(HostCall call, const at::Tensor& received,
                                                 const std::vector<at::Tensor>& sent, Op op) {
  require_shares(call.what, sent, received);
  JobPtr job = describe_reduction(call.what, Kind::kReduceScatter, received, sent, op);
  return issue(std::move(call), std::move(job));
}

HostChannel::WorkPtr HostChannel::broadcast(HostCall call, const at::Tensor& tensor, int64_t root) {
  auto operation = describe(call.what, Kind::kBroadcast, tensor);
  operation->message.root = static_cast<int32_t>(root);
  operation->output = tensor;
  if (root == rank_) operation->sent = {tensor};
  return issue(std::move(call), std::move(operation));
}

/// Checks that `of` holds one `each` per rank: in one tensor, or in one tensor per rank.
void HostChannel::require_shares(const std::string& what, const std::vector<at::Tensor>& of,
                                 const at::Tensor& each) const {
  const bool one = of.size() == 1;
  TORCH_CHECK_VALUE(one || of.size() == static_cast<size_t>(size_), what, ": a list of ", of.size(),
                    " tensors for ", size_, " ranks");
  for (const at::Tensor& tensor : of) {
    TORCH_CHECK_VALUE(tensor.numel() == each.numel() * (one ? size_ : 1), what, ": ",
                      tensor.numel(), " elements", one ? "" : " for a rank", ", while ", size_,
                      " ranks have ", each.numel(), " each");
    TORCH_CHECK_TYPE(tensor.scalar_type() == each.scalar_type(), what, ": ", tensor.scalar_type(),
                     " and ", each.scalar_type());
  }
}

HostChannel::WorkPtr HostChannel::all_gather(HostCall call, std::vector<at::Tensor> gathered,
                                             const at::Tensor& share) {
  require_shares(call.what, gathered, share);
  JobPtr job = gathering(call.what, std::move(gathered), share);
  return issue(std::move(call), std::move(job));
}

HostChannel::JobPtr HostChannel::gathering(const std::string& what, std::vector<at::Tensor> parts,
                                           const at::Tensor& own) {
  auto operation = describe(what, Kind::kAllGather, own);
  operation->message.numel = 0;
  for (const at::Tensor& part : parts) operation->message.numel += part.numel();
  operation->sent = {own};
  operation->parts = std::move(parts);
  return operation;
}

// --- running a collective ---

/// See Note [Sums in shared memory].
bool HostChannel::advance(Operation& operation, microseconds spin) {
  using Phase = Operation::Phase;
  if (operation.phase == Phase::kIssued) {
    post(operation);
    operation.phase = Phase::kPosted;
  }
  if (operation.phase == Phase::kPosted) {
    if (!all_have_come(operation, spin)) return false;
    APEX_HOST_STEP("all are here");
    check_messages(operation);
    do_part(operation);
    APEX_HOST_STEP("part done");
    if (operation.message.kind != Kind::kSumParts) return true;
    controls_[rank_]->done.store(operation.number + 1);
    APEX_HOST_STEP("done");
    event_->notify();
    operation.phase = Phase::kDone;
  }
  if (spin.count() > 0) spin = kSpinForParts;
  if (!all_have_come(operation, spin)) return false;
  APEX_HOST_STEP("all are done");
  take_result(operation);
  staged_[operation.number % 2].reset();
  return true;
}

void HostChannel::post(Operation& operation) {
  operation.number = next_++;
  operation.message.offset = stage_message(operation);
  APEX_HOST_STEP("message written");
  Control& mine = *controls_[rank_];
  mine.slots[operation.number % 2] = operation.message;
  APEX_HOST_STEP("described");
  mine.posted.store(operation.number + 1);
  APEX_HOST_STEP("posted");
  event_->notify();
}

/// Puts the message where peers can read it; returns its offset in this rank's memory.
uint64_t HostChannel::stage_message(Operation& operation) {
  if (operation.sent.empty()) return 0;
  const bool by_parts = operation.message.kind == Kind::kSumParts;
  size_t bytes = 0;
  for (const at::Tensor& part : operation.sent) bytes += part.nbytes();
  if (by_parts) {
    const auto offset = memory_->offset_of(operation.output.const_data_ptr(), bytes);
    if (offset) return *offset;
  }
  std::shared_ptr<char>& staged = staged_[operation.number % 2];
  staged.reset();
  staged = memory_->allocate(bytes);
  operation.copied = true;
  char* to = staged.get();
  if (by_parts) {
    const char* const data = data_of(operation.output);
    const auto [begin, end] = own_part(static_cast<int64_t>(bytes));
    copy_bytes(to, data, static_cast<size_t>(begin));
    copy_bytes(to + end, data + end, bytes - static_cast<size_t>(end));
  } else {
    for (const at::Tensor& part : operation.sent) {
      copy_bytes(to, part.const_data_ptr(), part.nbytes());
      to += part.nbytes();
    }
  }
  return *memory_->offset_of(staged.get(), bytes);
}

/// Whether all ranks have reached this point of the collective.
bool HostChannel::all_have_come(Operation& operation, microseconds spin) const {
  const bool spins = spin.count() > 0;
  const Clock::time_point until = spins ? Clock::now() + spin : Clock::time_point();
  for (;;) {
    // Read the count first: a change after this point increments it.
    operation.seen = event_->count();
    int peer = 0;
    while (peer < size_ && !waits_for(peer, operation)) ++peer;
    if (peer == size_) return true;
    if (!spins || Clock::now() >= until) return false;
    for (int i = 0; i < 32; ++i) relax();
  }
}

bool HostChannel::waits_for(int peer, const Operation& operation) const {
  const Control& control = *controls_[static_cast<size_t>(peer)];
  const bool met = operation.phase == Operation::Phase::kDone;
  return (met ? control.done : control.posted).load() <= operation.number;
}

const HostChannel::Message& HostChannel::message_of(int rank, const Operation& operation) const {
  return controls_[rank]->slots[operation.number % 2];
}

void HostChannel::check_messages(const Operation& operation) const {
  const Message& mine = operation.message;
  for (int peer = 0; peer < size_; ++peer) {
    const Message& other = message_of(peer, operation);
    const bool same_name = std::strncmp(other.what, mine.what, sizeof(mine.what)) == 0;
    const bool same_message = other.dtype == mine.dtype && other.numel == mine.numel &&
                              other.op == mine.op && other.root == mine.root;
    if (same_name && same_message && other.kind == mine.kind) continue;
    std::string text = "the ranks are in different collectives: " + name_of(rank_) +
                       " is in: " + operation.what + ", while " + name_of(peer) + " is in: " +
                       std::string(other.what, ::strnlen(other.what, sizeof(other.what)));
    if (same_name && !same_message) {
      const auto details = [](const Message& message) {
        return std::to_string(message.numel) + " elements of " + c10::toString(message.dtype) +
               ", " + text_of(message.op) + ", root " + std::to_string(message.root);
      };
      text += " (here " + details(mine) + "; there " + details(other) + ")";
    }
    throw Error(text);
  }
}

/// Copies or sums what this rank needs, or its part.
void HostChannel::do_part(Operation& operation) {
  for (int peer = 0; peer < size_; ++peer)
    operation.messages.push_back(memory_of(peer) + message_of(peer, operation).offset);
  const at::Tensor& output = operation.output;
  const std::vector<char*>& from = operation.messages;
  const int root = operation.message.root;
  switch (operation.message.kind) {
    case Kind::kSumParts:
      sum_part(operation);
      break;
    case Kind::kSumWhole:
    case Kind::kReduceScatter: {
      const bool by_shares = operation.message.kind == Kind::kReduceScatter;
      const size_t begin = by_shares ? output.nbytes() * static_cast<size_t>(rank_) : 0;
      std::vector<const char*> shares;
      for (const char* message : from) shares.push_back(message + begin);
      combine(operation.message.op, output.scalar_type(), output.numel(), shares,
              {data_of(output)});
      break;
    }
    case Kind::kBroadcast:
      if (root != rank_)
        copy_bytes(data_of(output), from[static_cast<size_t>(root)], output.nbytes());
      break;
    case Kind::kAllGather:
      for (size_t peer = 0; peer < from.size(); ++peer) {
        const bool one = operation.parts.size() == 1;
        const at::Tensor& to = operation.parts[one ? 0 : peer];
        const size_t share = to.nbytes() / (one ? from.size() : 1);
        copy_bytes(data_of(to) + (one ? share * peer : 0), from[peer], share);
      }
      break;
  }
}

/// Sums this rank's part of all messages, and writes it to all of them.
void HostChannel::sum_part(const Operation& operation) const {
  const at::Tensor& tensor = operation.output;
  const auto [begin, end] = own_part(static_cast<int64_t>(tensor.nbytes()));
  std::vector<char*> parts;
  for (char* message : operation.messages) parts.push_back(message + begin);
  parts[static_cast<size_t>(rank_)] = data_of(tensor) + begin;  // the copy lacks it
  combine(operation.message.op, tensor.scalar_type(), (end - begin) / tensor.element_size(),
          {parts.begin(), parts.end()}, parts);
}

/// Copies the sum of parts back, except for this rank's.
void HostChannel::take_result(const Operation& operation) const {
  if (operation.message.kind != Kind::kSumParts || !operation.copied) return;
  char* const data = data_of(operation.output);
  const char* const copy = operation.messages[static_cast<size_t>(rank_)];
  const auto bytes = static_cast<int64_t>(operation.output.nbytes());
  const auto [begin, end] = own_part(bytes);
  copy_bytes(data, copy, static_cast<size_t>(begin));
  copy_bytes(data + end, copy + end, static_cast<size_t>(bytes - end));
}

/// Byte range [begin, end) of a message that this rank sums, in whole cache lines.
std::pair<int64_t, int64_t> HostChannel::own_part(int64_t bytes) const {
  const auto line = static_cast<int64_t>(kCacheLine);
  const int64_t part = (bytes / size_ + line - 1) / line * line;
  return {std::min(bytes, part * rank_),
          rank_ + 1 == size_ ? bytes : std::min(bytes, part * (rank_ + 1))};
}

// --- peers that have failed ---

std::string HostChannel::awaited(const Operation& operation) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (waits_for(peer, operation)) return name_of(peer);
  }
  return "a processor";
}

void HostChannel::check_ranks(bool processes, const Operation* of) const {
  const auto is_missing = [&](int peer) { return of == nullptr || waits_for(peer, *of); };
  std::string why;
  for (int peer = 0; peer < size_ && why.empty(); ++peer) {
    if (!is_missing(peer)) continue;
    const Control& control = *controls_[peer];
    if (control.end.load() == End::kFailed) why = name_of(peer) + " reports: " + control.why;
    if (control.end.load() == End::kLeft) why = name_of(peer) + " has left the group";
    // It may have arrived just before it ended.
    if (!is_missing(peer)) why.clear();
  }
  // Ranks fail and leave because of a process that has ended, whichever of them this rank awaits.
  for (int peer = 0; peer < size_ && (processes || !why.empty()); ++peer) {
    const auto& process = peers_[peer].process;
    if (!process || controls_[peer]->end.load() != End::kNone ||
        state_of(*process) != ProcessState::kEnded)
      continue;
    if (why.empty() && !is_missing(peer)) continue;
    throw Error(name_of(peer) + " has ended (process " + std::to_string(process->pid) + ")");
  }
  if (!why.empty()) throw Error(why);
}

/// Publishes how this rank has ended; peers check it while they wait.
void HostChannel::tell_end(End end, const std::string& why) noexcept {
  Control& mine = *controls_[rank_];
  copy_bytes(mine.why, why.data(), character_before(why, sizeof(mine.why) - 1));
  mine.end.store(end);
  event_->notify();
}

}  // namespace apex::parallel
