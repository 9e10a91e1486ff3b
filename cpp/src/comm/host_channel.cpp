// SPDX-License-Identifier: BSD-3-Clause
#include "comm/host_channel.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>

#include <ATen/Functions.h>

#include <apex/error.h>

#include "comm/call_history.h"
#include "comm/host_sum.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The steps of the protocol, for tests that end or stop a process at each.
#ifndef APEX_HOST_STEP
#define APEX_HOST_STEP(name) ((void)0)
#endif

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;

constexpr uint64_t kRing = 256;
/// Up to this size every rank sums an all-reduce whole: one exchange instead of two.
constexpr int64_t kWhole = int64_t{16} << 10;
constexpr size_t kCacheLine = 64;
/// An all-reduce has at most so many shares, of at least so many bytes unless there are more ranks.
constexpr int kShares = 64;
constexpr int64_t kShareBytes = int64_t{256} << 10;
constexpr uint8_t kDone = 0x80;
constexpr microseconds kSpin{50};
/// A sleep, after which the peer is looked at.
constexpr milliseconds kNap{20};
/// The same, if others of this process's channels may need it.
constexpr microseconds kShortNap{500};

/// Of an empty tensor there may be no address.
void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

int processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

/// Sleeps while `word` is `value`, until somebody rings, or for so long.
void sleep_on(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds longest) {
#if defined(__linux__)
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  timespec time{};
  time.tv_sec = seconds.count();
  time.tv_nsec = static_cast<long>((longest - seconds).count());
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &time, nullptr, 0);
#else
  (void)word, (void)value;
  std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(longest, microseconds(100)));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
            0);
#else
  (void)word;
#endif
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

namespace {

const char* text_of(Op op) {
  static constexpr const char* kNames[] = {"sum",     "average",     "product",    "minimum",
                                           "maximum", "bitwise and", "bitwise or", "bitwise xor"};
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "another operation";
}

}  // namespace

enum class HostKind : uint8_t { kSumWhole, kSumShares, kBroadcast, kAllGather, kAllToAll };

/// What a rank says of a collective. In shared memory.
struct HostChannel::Message {
  HostKind kind = HostKind::kSumWhole;
  bool keeps_part = false;  ///< the rank's own part of the message is not there
  Op op = Op::SUM;
  at::ScalarType dtype = at::kByte;
  int32_t root = 0;
  int64_t numel = 0;  ///< has to be the same on all ranks
  HostPlace place;
  char what[168] = {};
};

/// In shared memory, at the beginning of each rank's first block; written by its rank.
struct HostChannel::Control {
  alignas(kCacheLine) std::atomic<uint64_t> posted{0};    ///< collectives
  alignas(kCacheLine) std::atomic<uint64_t> finished{0};  ///< this rank reads no more of so many
  std::atomic<uint64_t> handed_over[kRing / 64] = {};     ///< bits by slot: its part is there now
  std::atomic<End> end{End::kNone};
  char why[256] = {};  ///< it has failed; written before `end`
  alignas(kCacheLine) Message ring[kRing];
};

/// In shared memory, behind rank 0's Control; written by all.
struct HostChannel::Common {
  struct Slot {
    /// 0, or rank + 1 of who does this share, with kDone when it is done.
    alignas(kCacheLine) std::atomic<uint8_t> claims[kShares] = {};
    std::atomic<uint32_t> done{0};  ///< shares
  };
  alignas(kCacheLine) std::atomic<uint32_t> bell{0};  ///< rung whenever anything has changed
  std::atomic<uint32_t> sleepers{0};
  Slot slots[kRing];
};

struct HostOperation {
  uint64_t number = 0;
  HostKind kind = HostKind::kSumWhole;
  Op op = Op::SUM;
  int root = 0;
  std::string what;
  at::Tensor output;             ///< held, and written
  int64_t bytes = 0;             ///< of it
  std::vector<int64_t> rooms;    ///< all-to-all: bytes for each rank in output
  std::shared_ptr<char> staged;  ///< what peers read, if it is a copy
  std::vector<char*> messages;   ///< summed by shares: of each rank, as its peers see them
  bool keeps_part = false;       ///< of its own message, the part is in `output` only
  bool begun = false;            ///< all ranks have posted it, and this one has looked at it
  bool completed = false;        ///< the result is there
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint8_t>::is_always_lock_free);

namespace {

/// Of this process. Never destroyed.
struct AllChannels {
  std::mutex mutex;
  std::vector<HostChannel*> channels;
};

AllChannels& all_channels() {
  static auto* const instance = new AllChannels;
  return *instance;
}

}  // namespace

void HostChannel::prepare(HostMemory& memory) {
  static_assert(std::is_trivially_copyable_v<Message>);
  static_assert(sizeof(Control) + sizeof(Common) < kFirstBytes / 1024);
  static_assert(kMostRanks < kDone && kMostRanks <= kShares);
  new (memory.first()) Control;
  new (memory.first() + sizeof(Control)) Common;
  memory.reserve(sizeof(Control) + sizeof(Common));
}

HostChannel::HostChannel(int rank, std::shared_ptr<HostMemory> memory, std::vector<Peer> peers,
                         milliseconds timeout)
    : rank_(rank),
      size_(static_cast<int>(peers.size())),
      timeout_(timeout),
      memory_(std::move(memory)),
      pid_(this_pid()),
      spins_(size_ <= processors()),
      peers_(std::move(peers)) {
  for (int peer = 0; peer < size_; ++peer) {
    char* first = peer == rank_ ? memory_->first() : peers_[peer].memory->at(peers_[peer].first);
    controls_.push_back(reinterpret_cast<Control*>(first));
    if (peer == 0) common_ = reinterpret_cast<Common*>(first + sizeof(Control));
  }
  const std::lock_guard<std::mutex> lock(all_channels().mutex);
  all_channels().channels.push_back(this);
}

HostChannel::~HostChannel() {
  // In a forked process a mutex may be held by a thread that is not there.
  if (this_pid() != pid_) return;
  {
    const std::lock_guard<std::mutex> lock(all_channels().mutex);
    auto& channels = all_channels().channels;
    channels.erase(std::find(channels.begin(), channels.end(), this));
  }
  if (!failure_.empty()) return;
  for (const auto& operation : pending_) hand_over(*operation);
  tell_end(End::kLeft);
}

bool HostChannel::can_all_reduce(const at::Tensor& tensor, Op op) {
  if (tensor.is_complex()) return op == Op::SUM || op == Op::AVG;
  return can_combine(op, tensor.scalar_type());
}

at::Tensor HostChannel::allocate(int64_t numel, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  std::shared_ptr<char> memory = memory_->allocate(bytes);
  std::memset(memory.get(), 0, bytes);
  void* data = memory.get();
  return at::from_blob(
      data, {numel}, [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
}

/// The mutex, held. Tensors are let go of when it is not: their last reference may be Python's,
/// whose lock another thread may hold while it waits for this one.
class HostChannel::Held {
 public:
  explicit Held(HostChannel& channel) : channel_(channel), lock_(channel.mutex_) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    std::vector<at::Tensor> released;
    released.swap(channel_.released_);
    lock_.unlock();
  }
  Lock& lock() { return lock_; }

 private:
  HostChannel& channel_;
  Lock lock_;
};

// --- issuing ---

void HostChannel::require_usable() const {
  if (this_pid() != pid_) {
    throw Error(
        "this process was forked from the one that made the communicator, and is no rank of it: "
        "make process groups and wrappers after the fork");
  }
  if (!failure_.empty()) throw Error("a collective of this group has failed before: " + failure_);
}

/// Memory for peers to read: in the first block, if there is room, which all peers have mapped, so
/// that it can be read when this process has ended. Returns where it lies.
HostPlace HostChannel::stage(Operation& operation, size_t bytes) {
  operation.staged = memory_->allocate(bytes, /*in_first=*/true);
  if (!operation.staged) operation.staged = memory_->allocate(bytes);
  return *memory_->place_of(operation.staged.get(), bytes);
}

/// A copy of all of `tensor` there.
HostPlace HostChannel::stage_copy(Operation& operation, const at::Tensor& tensor) {
  const HostPlace place = stage(operation, tensor.nbytes());
  copy_bytes(operation.staged.get(), tensor.const_data_ptr(), tensor.nbytes());
  return place;
}

HostChannel::WorkPtr HostChannel::post(Lock& lock, std::shared_ptr<Operation> operation,
                                       Message message) {
  // Its slot may still be read. While this thread waits, another may post.
  while (next_ >= kRing && !all_finished(next_ - kRing)) {
    const auto is_free = [&] { return all_finished(next_ - kRing); };
    if (!wait(lock, is_free, nullptr, Clock::now() + timeout_)) {
      fail("timed out after " + std::to_string(timeout_.count()) +
           " ms waiting for a rank that is " + std::to_string(kRing) + " collectives behind");
    }
  }
  const uint64_t number = next_;
  next_ = number + 1;
  operation->number = number;
  operation->kind = message.kind;
  operation->op = message.op;
  operation->root = message.root;
  operation->keeps_part = message.keeps_part;
  const std::string said = CallHistory::in_common(operation->what);
  copy_bytes(message.what, said.data(), std::min(said.size(), sizeof(message.what) - 1));
  APEX_HOST_STEP("message written");
  Control& mine = *controls_[rank_];
  const uint64_t slot = number % kRing;
  mine.ring[slot] = message;
  mine.handed_over[slot / 64].fetch_and(~(uint64_t{1} << slot % 64));
  if (rank_ == 0) {
    for (auto& claim : common_->slots[slot].claims) claim.store(0, std::memory_order_relaxed);
    common_->slots[slot].done.store(0, std::memory_order_relaxed);
  }
  pending_.push_back(operation);
  APEX_HOST_STEP("described");
  mine.posted.store(number + 1);
  APEX_HOST_STEP("posted");
  ring();
  advance();
  return c10::make_intrusive<HostWork>(shared_from_this(), std::move(operation));
}

HostChannel::WorkPtr HostChannel::all_reduce(const std::string& what, const at::Tensor& tensor,
                                             Op op) {
  Held held(*this);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->output = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const at::Tensor& real = operation->output;
  char* data = static_cast<char*>(real.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(real.nbytes());
  operation->bytes = bytes;
  Message message;
  message.op = op;
  message.dtype = real.scalar_type();
  message.numel = real.numel();
  if (bytes <= kWhole) {
    message.place = stage_copy(*operation, real);
  } else {
    message.kind = HostKind::kSumShares;
    if (const auto place = memory_->place_of(data, static_cast<size_t>(bytes))) {
      message.place = *place;
    } else {
      message.keeps_part = true;
      message.place = stage(*operation, static_cast<size_t>(bytes));
      char* const copy = operation->staged.get();
      const auto [begin, end] = part_of(rank_, bytes);
      copy_bytes(copy, data, static_cast<size_t>(begin));
      copy_bytes(copy + end, data + end, static_cast<size_t>(bytes - end));
    }
  }
  return post(held.lock(), std::move(operation), message);
}

HostChannel::WorkPtr HostChannel::broadcast(const std::string& what, const at::Tensor& tensor,
                                            int64_t root) {
  Held held(*this);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->output = tensor;
  Message message;
  message.kind = HostKind::kBroadcast;
  message.dtype = tensor.scalar_type();
  message.numel = tensor.numel();
  message.root = static_cast<int32_t>(root);
  if (root == rank_) {
    message.place = stage_copy(*operation, tensor);
  }
  return post(held.lock(), std::move(operation), message);
}

HostChannel::WorkPtr HostChannel::all_gather(const std::string& what, const at::Tensor& gathered,
                                             const at::Tensor& share) {
  TORCH_CHECK_VALUE(gathered.numel() == share.numel() * size_, what, ": room for ",
                    gathered.numel(), " elements, while ", size_, " ranks have ", share.numel(),
                    " each");
  Held held(*this);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->output = gathered;
  Message message;
  message.kind = HostKind::kAllGather;
  message.dtype = share.scalar_type();
  message.numel = share.numel();
  message.place = stage_copy(*operation, share);
  return post(held.lock(), std::move(operation), message);
}

HostChannel::WorkPtr HostChannel::all_to_all(const std::string& what, const at::Tensor& received,
                                             const at::Tensor& sent,
                                             const std::vector<int64_t>& received_numel,
                                             const std::vector<int64_t>& sent_numel) {
  Held held(*this);
  require_usable();
  const auto bytes_of = [&](const at::Tensor& tensor, const std::vector<int64_t>& lengths) {
    std::vector<int64_t> bytes;
    const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
    const auto row = static_cast<int64_t>(rows > 0 ? tensor.nbytes() / rows : 0);
    for (int peer = 0; peer < size_; ++peer)
      bytes.push_back(row * (lengths.empty() ? rows / size_ : lengths[peer]));
    return bytes;
  };
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->output = received;
  operation->rooms = bytes_of(received, received_numel);
  const std::vector<int64_t> lengths = bytes_of(sent, sent_numel);
  // What is for whom, then the data.
  const size_t head = sizeof(int64_t) * static_cast<size_t>(size_);
  Message message;
  message.kind = HostKind::kAllToAll;
  message.dtype = sent.scalar_type();
  message.place = stage(*operation, head + sent.nbytes());
  copy_bytes(operation->staged.get(), lengths.data(), head);
  copy_bytes(operation->staged.get() + head, sent.const_data_ptr(), sent.nbytes());
  return post(held.lock(), std::move(operation), message);
}

// --- doing what can be done ---

bool HostChannel::all_posted(uint64_t number) const {
  return std::all_of(controls_.begin(), controls_.end(),
                     [&](const Control* one) { return one->posted.load() > number; });
}

bool HostChannel::all_finished(uint64_t number) const {
  return std::all_of(controls_.begin(), controls_.end(),
                     [&](const Control* one) { return one->finished.load() > number; });
}

/// Does what this rank can do now.
/// @param helps  also shares of parts that belong to others.
void HostChannel::advance(bool helps) {
  bool in_order = true;  // nothing before is unfinished
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

/// Says so if this rank needs nothing more of it; returns whether it may be forgotten.
bool HostChannel::finish(Operation& operation, bool in_order) {
  if (!in_order) return false;
  std::atomic<uint64_t>& finished = controls_[rank_]->finished;
  if (finished.load() <= operation.number) {
    finished.store(operation.number + 1);
    APEX_HOST_STEP("finished");
    ring();
  }
  // Peers read a copy until they have finished.
  if (operation.staged && !all_finished(operation.number)) return false;
  complete(operation);
  return true;
}

/// The result is there, and no peer uses this rank's memory any more.
void HostChannel::complete(Operation& operation) {
  operation.completed = true;
  released_.push_back(std::move(operation.output));
  operation.staged.reset();
}

/// All ranks have posted it.
void HostChannel::begin(Operation& operation) {
  check_messages(operation);
  try {
    if (operation.kind == HostKind::kSumShares) {
      // When others have done it all, they may have ended since.
      if (!all_shares_done(operation)) find_messages(operation);
    } else {
      read_messages(operation);
    }
  } catch (const std::exception& error) {
    if (!failure_.empty()) throw;
    // Most likely because its owner is gone.
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
    // The kind follows from these.
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

/// Takes what this rank needs of the messages.
void HostChannel::read_messages(Operation& operation) {
  std::vector<char*> from;
  for (int peer = 0; peer < size_; ++peer) {
    const HostPlace& place = message_of(peer, operation.number).place;
    if (operation.kind == HostKind::kBroadcast && peer != operation.root) {
      from.push_back(nullptr);
    } else {
      from.push_back(peer == rank_ ? operation.staged.get() : peers_[peer].memory->at(place));
    }
  }
  char* out = static_cast<char*>(operation.output.mutable_data_ptr());
  const size_t bytes = operation.output.nbytes();
  switch (operation.kind) {
    case HostKind::kSumWhole:
      combine(operation.op, operation.output.scalar_type(), operation.output.numel(),
              {from.begin(), from.end()}, {out});
      break;
    case HostKind::kBroadcast:
      if (operation.root != rank_) copy_bytes(out, from[operation.root], bytes);
      break;
    case HostKind::kAllGather:
      for (int peer = 0; peer < size_; ++peer) {
        const size_t share = bytes / static_cast<size_t>(size_);
        copy_bytes(out + share * static_cast<size_t>(peer), from[peer], share);
      }
      break;
    case HostKind::kAllToAll:
      for (int peer = 0; peer < size_; ++peer) {
        const auto* lengths = reinterpret_cast<const int64_t*>(from[peer]);
        const char* data = from[peer] + sizeof(int64_t) * static_cast<size_t>(size_);
        for (int before = 0; before < rank_; ++before) data += lengths[before];
        if (lengths[rank_] > operation.rooms[peer]) {
          fail(operation.what + ": " + name_of(peer) + " sends " + std::to_string(lengths[rank_]) +
               " bytes, and there is room for " + std::to_string(operation.rooms[peer]));
        }
        copy_bytes(out, data, static_cast<size_t>(lengths[rank_]));
        out += operation.rooms[peer];
      }
      break;
    case HostKind::kSumShares:
      break;
  }
  // What lies in another block is mapped when it is first read, for which this process has to be
  // there; then it has completed when all have finished.
  operation.completed = !operation.staged || message_of(rank_, operation.number).place.block == 0;
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

/// Each rank's part has as many.
int HostChannel::shares_of(const Operation& operation) const {
  const auto wanted = static_cast<int>(std::min<int64_t>(kShares, operation.bytes / kShareBytes));
  return std::max(1, wanted / size_) * size_;
}

/// Of a message, the bytes that belong to a rank, from and to: whole cache lines.
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

/// Claims shares and sums them: of the own part, and, if this rank helps, of all.
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
    ring();
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

/// The result lies in the copy, if there is one; but for a part that was kept.
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
  // What this rank has summed of it already is copied as it is.
  copy_bytes(operation.staged.get() + begin, data + begin, static_cast<size_t>(end - begin));
  operation.keeps_part = false;
  const uint64_t slot = operation.number % kRing;
  controls_[rank_]->handed_over[slot / 64].fetch_or(uint64_t{1} << slot % 64);
  APEX_HOST_STEP("handed over");
  ring();
}

/// In the channels of this process other than `but`; returns whether there is anything to come.
bool HostChannel::advance_others(const HostChannel* but) {
  const std::lock_guard<std::mutex> lock(all_channels().mutex);
  bool more = false;
  for (HostChannel* const channel : all_channels().channels) {
    if (channel == but || channel->pid_ != this_pid()) continue;
    const Lock other(channel->mutex_, std::try_to_lock);
    if (!other) continue;  // its own thread sees to it
    try {
      if (channel->failure_.empty()) channel->advance(/*helps=*/true);
    } catch (const std::exception&) {
      // Who waits there will hear.
    }
    more = more || !channel->pending_.empty();
  }
  return more;
}

void advance_host_channels() { HostChannel::advance_others(nullptr); }

// --- waiting ---

/// The ranks that `operation` cannot go on without; null: the ring.
std::vector<int> HostChannel::waited_for(const Operation* operation) const {
  std::vector<int> ranks;
  const auto add_if = [&](auto&& is_late) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && is_late(*controls_[peer])) ranks.push_back(peer);
    }
    return ranks;
  };
  const auto has_not_finished = [](uint64_t number) {
    return [number](const Control& peer) { return peer.finished.load() <= number; };
  };
  if (operation == nullptr) return add_if(has_not_finished(next_ - kRing));
  // Messages are read in order: what comes before may be what holds it up.
  for (const auto& before : pending_) {
    if (before->number > operation->number) break;
    if (before->begun) continue;
    return add_if([&](const Control& peer) { return peer.posted.load() <= before->number; });
  }
  if (operation->kind != HostKind::kSumShares) return add_if(has_not_finished(operation->number));
  const Common::Slot& slot = common_->slots[operation->number % kRing];
  const int shares = shares_of(*operation);
  for (int share = 0; share < shares; ++share) {
    const uint8_t claim = slot.claims[share].load();
    const int owner = share / (shares / size_);
    if ((claim & kDone) != 0) continue;
    if (claim != 0) {
      ranks.push_back(claim - 1);
    } else if (owner != rank_ && keeps_part(owner, *operation)) {
      ranks.push_back(owner);
    }
  }
  return ranks;
}

bool HostChannel::wait(Lock& lock, const std::function<bool()>& done, const Operation* operation,
                       Clock::time_point until) {
  Clock::time_point looked = Clock::now();
  const Clock::time_point spin_until = looked + (spins_ ? kSpin : microseconds(0));
  for (;;) {
    require_usable();
    // The bell first: what it announces is looked at after that, or else it has been rung since.
    const uint32_t bell = common_->bell.load();
    advance(/*helps=*/true);
    if (done()) return true;
    const Clock::time_point now = Clock::now();
    if (now >= until) return false;
    if (now < spin_until) {
      for (int i = 0; i < 32; ++i) relax();
      continue;
    }
    check_ends(operation);
    common_->sleepers.fetch_add(1);
    APEX_HOST_STEP("sleeps");
    lock.unlock();
    const std::chrono::nanoseconds nap = advance_others(this) ? kShortNap : kNap;
    sleep_on(common_->bell, bell, std::min<std::chrono::nanoseconds>(nap, until - now));
    lock.lock();
    common_->sleepers.fetch_sub(1);
    if (Clock::now() - looked < kNap) continue;
    check_ends(operation, /*processes=*/true);
    looked = Clock::now();
  }
}

void HostChannel::ring() noexcept {
  common_->bell.fetch_add(1);
  APEX_HOST_STEP("rung");
  if (common_->sleepers.load() > 0) wake_all(common_->bell);
}

/// The first peer whose process has ended, in words, or "".
std::string HostChannel::ended_process() const {
  for (int peer = 0; peer < size_; ++peer) {
    const auto& process = peers_[peer].process;
    if (peer != rank_ && process && state_of(*process) == ProcessState::kEnded)
      return describe_ended(peer);
  }
  return {};
}

std::string HostChannel::describe_ended(int peer) const {
  return name_of(peer) + ", process " + std::to_string(peers_[peer].process->pid) +
         " of this host, has ended";
}

std::string HostChannel::name_of(int peer) const {
  const int named = peers_[peer].named;
  return "rank " + std::to_string(named < 0 ? peer : named);
}

/// Fails if a peer that `operation` waits for will not come any more.
void HostChannel::check_ends(const Operation* operation, bool processes) {
  for (const int peer : waited_for(operation)) {
    std::string end;
    switch (controls_[peer]->end.load()) {
      case End::kNone:
        break;
      case End::kFailed:
        end = name_of(peer) + " reports: " + controls_[peer]->why;
        break;
      case End::kLeft:
        end = name_of(peer) + " has let go of the group";
        break;
    }
    const auto& process = peers_[peer].process;
    if (end.empty() && processes && process && state_of(*process) == ProcessState::kEnded)
      end = describe_ended(peer);
    if (end.empty()) continue;
    // It may have come just before.
    const std::vector<int> still = waited_for(operation);
    if (std::find(still.begin(), still.end(), peer) != still.end()) fail(end);
  }
}

/// How this rank has ended; peers look at it only while they wait for this rank.
void HostChannel::tell_end(End end) noexcept {
  controls_[rank_]->end.store(end);
  ring();
}

void HostChannel::fail(const std::string& why) {
  failure_ = why;
  char* const told = controls_[rank_]->why;
  copy_bytes(told, why.data(), std::min(why.size(), sizeof(Control::why) - 1));
  tell_end(End::kFailed);
  throw Error(why);
}

void HostChannel::give_up(const std::string& why) noexcept {
  const Held held(*this);
  if (this_pid() != pid_ || !failure_.empty()) return;
  try {
    fail(why);
  } catch (const std::exception&) {
    // Said.
  }
}

// --- HostWork ---

HostWork::HostWork(std::shared_ptr<HostChannel> channel, std::shared_ptr<HostOperation> operation)
    : Work(channel->rank_, c10d::OpType::UNKNOWN),
      channel_(std::move(channel)),
      operation_(std::move(operation)) {}

HostWork::~HostWork() { hand_over(); }

void HostWork::hand_over() {
  if (this_pid() != channel_->pid_) return;
  const HostChannel::Held held(*channel_);
  if (channel_->failure_.empty()) channel_->hand_over(*operation_);
}

bool HostWork::isCompleted() {
  if (this_pid() != channel_->pid_) return false;
  const HostChannel::Held held(*channel_);
  if (operation_->completed || !channel_->failure_.empty()) return operation_->completed;
  try {
    channel_->advance();
  } catch (const std::exception&) {
    return false;  // wait() tells
  }
  return operation_->completed;
}

bool HostWork::isSuccess() const {
  const std::lock_guard<std::mutex> lock(channel_->mutex_);
  return operation_->completed;
}

bool HostWork::wait_for(milliseconds slice, const std::function<bool()>& interrupted) {
  HostChannel::Held held(*channel_);
  if (operation_->completed) return true;
  const Clock::time_point now = Clock::now();
  if (!deadline_) deadline_ = now + channel_->timeout_;
  const auto done = [&] { return operation_->completed || (interrupted && interrupted()); };
  if (channel_->wait(held.lock(), done, operation_.get(), std::min(now + slice, *deadline_)))
    return operation_->completed;
  if (Clock::now() < *deadline_) return false;
  const std::vector<int> late = channel_->waited_for(operation_.get());
  channel_->fail("timed out after " + std::to_string(channel_->timeout_.count()) +
                 " ms waiting for " +
                 (late.empty() ? "a processor" : channel_->name_of(late.front())));
}

bool HostWork::wait(milliseconds timeout) {
  const Clock::time_point end =
      timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  for (;;) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    if (wait_for(std::clamp(left, milliseconds(0), milliseconds(1000)))) return true;
    if (Clock::now() >= end) throw Error("the collective has not completed in time");
  }
}

}  // namespace apex::parallel
