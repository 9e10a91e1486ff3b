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
constexpr microseconds kSpin{50};
/// A sleep, after which the peer is looked at.
constexpr milliseconds kNap{20};

enum class Kind : uint8_t { kSumWhole, kSumShares, kBroadcast, kAllGather, kAllToAll };

int64_t this_pid() {
#if defined(__linux__)
  return ::getpid();
#else
  return 0;
#endif
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
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
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

/// What a rank says of a collective. In shared memory.
struct HostChannel::Message {
  uint64_t number = 0;
  Kind kind = Kind::kSumWhole;
  Op op = Op::SUM;
  at::ScalarType dtype = at::kByte;
  int32_t root = 0;
  int64_t numel = 0;  ///< has to be the same on all ranks
  HostPlace place;
  char what[168] = {};
};

/// In shared memory, at the beginning of each rank's first block. Written by its rank, but for
/// `sleepers`.
struct HostChannel::Control {
  alignas(kCacheLine) std::atomic<uint64_t> posted{0};
  alignas(kCacheLine) std::atomic<uint64_t> summed{0};
  alignas(kCacheLine) std::atomic<uint32_t> bell{0};  ///< rung whenever one of these changes
  std::atomic<uint32_t> sleepers{0};                  ///< peers that sleep on it
  std::atomic<End> end{End::kNone};
  alignas(kCacheLine) Message ring[kRing];
};

struct HostOperation {
  enum class State { kPosted, kSummed, kDone };

  uint64_t number = 0;
  Kind kind = Kind::kSumWhole;
  Op op = Op::SUM;
  int root = 0;
  std::string what;
  at::Tensor output;                  ///< held, and written
  std::vector<int64_t> rooms;         ///< all-to-all: bytes for each rank in output
  std::shared_ptr<char> staged;       ///< what peers read, if it is a copy
  char* message = nullptr;            ///< summed by shares: as peers see it
  std::vector<char*> messages;        ///< summed by shares: of each rank, here
  State state = State::kPosted;
  bool completed = false;             ///< the result is there
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void HostChannel::prepare(HostMemory& memory) {
  static_assert(std::is_trivially_copyable_v<Message>);
  static_assert(sizeof(Control) < kFirstBytes / 2);
  new (memory.first()) Control;
  memory.reserve(sizeof(Control));
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
  }
}

HostChannel::~HostChannel() {
  if (this_pid() == pid_) tell_end(End::kLeft);
}

/// How a rank has ended; peers look at it only while they wait for that rank.
void HostChannel::tell_end(End end) noexcept {
  Control& mine = *controls_[rank_];
  mine.end.store(end);
  mine.bell.fetch_add(1);
  wake_all(mine.bell);
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
  return at::from_blob(data, {numel}, [memory = std::move(memory)](void*) mutable { memory.reset(); },
                       options);
}

// --- issuing ---

void HostChannel::require_usable() const {
  if (this_pid() != pid_) {
    throw Error(
        "this process was forked from the one that made the communicator, and is no rank of it: "
        "make process groups and wrappers after the fork");
  }
  if (!failure_.empty()) throw Error("a collective of this group has failed before: " + failure_);
}

/// Memory for peers to read. Small messages lie in the first block, which all peers have mapped:
/// they can be read when this process has ended.
std::shared_ptr<char> HostChannel::stage(size_t bytes) {
  if (bytes <= size_t{64} << 10) {
    if (auto memory = memory_->allocate(bytes, /*in_first=*/true)) return memory;
  }
  return memory_->allocate(bytes);
}

std::shared_ptr<HostOperation> HostChannel::post(std::unique_lock<std::mutex>& lock,
                                                 std::shared_ptr<HostOperation> operation,
                                                 Message message) {
  const uint64_t number = next_;
  if (number >= kRing) {
    // Its slot may still be read.
    wait(lock, [&] { return all_have(&Control::summed, number - kRing); }, *operation,
         Clock::now() + timeout_);
  }
  next_ = number + 1;
  operation->number = message.number = number;
  operation->kind = message.kind;
  operation->op = message.op;
  operation->root = message.root;
  const std::string said = CallHistory::in_common(operation->what);
  std::memcpy(message.what, said.data(), std::min(said.size(), sizeof(message.what) - 1));
  controls_[rank_]->ring[number % kRing] = message;
  pending_.push_back(operation);
  say(&Control::posted, number + 1);
  advance();
  return operation;
}

/// Publishes a counter, and everything written before.
void HostChannel::say(std::atomic<uint64_t> Control::*what, uint64_t value) {
  Control& mine = *controls_[rank_];
  (mine.*what).store(value, std::memory_order_release);
  mine.bell.fetch_add(1);
  if (mine.sleepers.load() > 0) wake_all(mine.bell);
}

HostChannel::WorkPtr HostChannel::all_reduce(const std::string& what, const at::Tensor& tensor,
                                             Op op) {
  std::unique_lock<std::mutex> lock(mutex_);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->output = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const at::Tensor& real = operation->output;
  char* data = static_cast<char*>(real.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(real.nbytes());
  Message message;
  message.op = op;
  message.dtype = real.scalar_type();
  message.numel = real.numel();
  if (bytes <= kWhole) {
    message.kind = Kind::kSumWhole;
    operation->staged = stage(static_cast<size_t>(bytes));
    std::memcpy(operation->staged.get(), data, static_cast<size_t>(bytes));
    message.place = *memory_->place_of(operation->staged.get(), static_cast<size_t>(bytes));
  } else {
    message.kind = Kind::kSumShares;
    operation->message = data;
    auto place = memory_->place_of(data, static_cast<size_t>(bytes));
    if (!place) {
      operation->staged = memory_->allocate(static_cast<size_t>(bytes));
      operation->message = operation->staged.get();
      place = memory_->place_of(operation->message, static_cast<size_t>(bytes));
      const auto [begin, end] = share_of(rank_, message.numel, real.element_size());
      std::memcpy(operation->message, data, static_cast<size_t>(begin));
      std::memcpy(operation->message + end, data + end, static_cast<size_t>(bytes - end));
    }
    message.place = *place;
  }
  return c10::make_intrusive<HostWork>(shared_from_this(),
                                       post(lock, std::move(operation), message));
}

HostChannel::WorkPtr HostChannel::broadcast(const std::string& what, const at::Tensor& tensor,
                                            int64_t root) {
  std::unique_lock<std::mutex> lock(mutex_);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->output = tensor;
  Message message;
  message.kind = Kind::kBroadcast;
  message.dtype = tensor.scalar_type();
  message.numel = tensor.numel();
  message.root = static_cast<int32_t>(root);
  if (root == rank_) {
    operation->staged = stage(tensor.nbytes());
    std::memcpy(operation->staged.get(), tensor.const_data_ptr(), tensor.nbytes());
    message.place = *memory_->place_of(operation->staged.get(), tensor.nbytes());
  }
  return c10::make_intrusive<HostWork>(shared_from_this(),
                                       post(lock, std::move(operation), message));
}

HostChannel::WorkPtr HostChannel::all_gather(const std::string& what, const at::Tensor& gathered,
                                             const at::Tensor& share) {
  TORCH_CHECK_VALUE(gathered.numel() == share.numel() * size_, what, ": room for ",
                    gathered.numel(), " elements, while ", size_, " ranks have ", share.numel(),
                    " each");
  std::unique_lock<std::mutex> lock(mutex_);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->output = gathered;
  Message message;
  message.kind = Kind::kAllGather;
  message.dtype = share.scalar_type();
  message.numel = share.numel();
  operation->staged = stage(share.nbytes());
  std::memcpy(operation->staged.get(), share.const_data_ptr(), share.nbytes());
  message.place = *memory_->place_of(operation->staged.get(), share.nbytes());
  return c10::make_intrusive<HostWork>(shared_from_this(),
                                       post(lock, std::move(operation), message));
}

HostChannel::WorkPtr HostChannel::all_to_all(const std::string& what, const at::Tensor& received,
                                             const at::Tensor& sent,
                                             const std::vector<int64_t>& received_numel,
                                             const std::vector<int64_t>& sent_numel) {
  std::unique_lock<std::mutex> lock(mutex_);
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
  message.kind = Kind::kAllToAll;
  message.dtype = sent.scalar_type();
  operation->staged = stage(head + sent.nbytes());
  std::memcpy(operation->staged.get(), lengths.data(), head);
  std::memcpy(operation->staged.get() + head, sent.const_data_ptr(), sent.nbytes());
  message.place = *memory_->place_of(operation->staged.get(), head + sent.nbytes());
  return c10::make_intrusive<HostWork>(shared_from_this(),
                                       post(lock, std::move(operation), message));
}

// --- progress ---

bool HostChannel::all_have(std::atomic<uint64_t> Control::*what, uint64_t number) const {
  return std::all_of(controls_.begin(), controls_.end(), [&](const Control* control) {
    return (control->*what).load(std::memory_order_acquire) > number;
  });
}

/// Does what this rank can do now.
void HostChannel::advance() {
  for (auto next = pending_.begin(); next != pending_.end();) {
    HostOperation& operation = **next;
    if (operation.state == HostOperation::State::kPosted) {
      if (!all_have(&Control::posted, operation.number)) return;
      check_messages(operation);
      try {
        do_part(operation);
      } catch (const std::exception& error) {
        fail(error.what());
      }
      operation.state = HostOperation::State::kSummed;
      say(&Control::summed, operation.number + 1);
    }
    if (!all_have(&Control::summed, operation.number)) {
      ++next;
      continue;
    }
    if (operation.kind == Kind::kSumShares) take_shares(operation);
    operation.state = HostOperation::State::kDone;
    operation.completed = true;
    operation.output = at::Tensor();
    operation.staged.reset();
    next = pending_.erase(next);
  }
}

const HostChannel::Message& HostChannel::message_of(int rank, uint64_t number) const {
  return controls_[rank]->ring[number % kRing];
}

void HostChannel::check_messages(HostOperation& operation) {
  const Message& mine = message_of(rank_, operation.number);
  for (int peer = 0; peer < size_; ++peer) {
    const Message& other = message_of(peer, operation.number);
    const std::string said(other.what, ::strnlen(other.what, sizeof(other.what)));
    const std::string texts = "the ranks are in different collectives: rank " +
                              std::to_string(rank_) + " is in: " + operation.what +
                              ", while rank " + std::to_string(peer) + " is in: " + said;
    if (std::strncmp(other.what, mine.what, sizeof(mine.what)) != 0 || other.kind != mine.kind ||
        other.op != mine.op || other.root != mine.root) {
      fail(texts);
    }
    if (other.dtype != mine.dtype || other.numel != mine.numel) {
      fail(texts + " (" + std::to_string(mine.numel) + " elements of " +
           c10::toString(mine.dtype) + " here, " + std::to_string(other.numel) + " of " +
           c10::toString(other.dtype) + " there)");
    }
  }
}

/// Of `numel` elements, the bytes that this rank sums, from and to: whole cache lines.
std::pair<int64_t, int64_t> HostChannel::share_of(int rank, int64_t numel, size_t element) const {
  const int64_t bytes = numel * static_cast<int64_t>(element);
  const auto line = static_cast<int64_t>(kCacheLine);
  const int64_t share = (bytes / size_ + line - 1) / line * line;
  return {std::min(bytes, share * rank), rank + 1 == size_ ? bytes : std::min(bytes, share * (rank + 1))};
}

void HostChannel::do_part(HostOperation& operation) {
  if (operation.kind == Kind::kSumShares) return sum_share(operation);
  std::vector<char*> from;
  for (int peer = 0; peer < size_; ++peer) {
    const HostPlace& place = message_of(peer, operation.number).place;
    if (operation.kind == Kind::kBroadcast && peer != operation.root) {
      from.push_back(nullptr);
    } else {
      from.push_back(peer == rank_ ? operation.staged.get() : peers_[peer].memory->at(place));
    }
  }
  char* out = static_cast<char*>(operation.output.mutable_data_ptr());
  const size_t bytes = operation.output.nbytes();
  switch (operation.kind) {
    case Kind::kSumWhole:
      combine(operation.op, operation.output.scalar_type(), operation.output.numel(),
              {from.begin(), from.end()}, {out});
      break;
    case Kind::kBroadcast:
      if (operation.root != rank_) std::memcpy(out, from[operation.root], bytes);
      break;
    case Kind::kAllGather:
      for (int peer = 0; peer < size_; ++peer) {
        const size_t share = bytes / static_cast<size_t>(size_);
        std::memcpy(out + share * static_cast<size_t>(peer), from[peer], share);
      }
      break;
    case Kind::kAllToAll:
      for (int peer = 0; peer < size_; ++peer) {
        const auto* lengths = reinterpret_cast<const int64_t*>(from[peer]);
        const char* data = from[peer] + sizeof(int64_t) * static_cast<size_t>(size_);
        for (int before = 0; before < rank_; ++before) data += lengths[before];
        if (lengths[rank_] > operation.rooms[peer]) {
          fail(operation.what + ": rank " + std::to_string(peer) + " sends " +
               std::to_string(lengths[rank_]) + " bytes, and there is room for " +
               std::to_string(operation.rooms[peer]));
        }
        std::memcpy(out, data, static_cast<size_t>(lengths[rank_]));
        out += operation.rooms[peer];
      }
      break;
    case Kind::kSumShares: break;
  }
  // What lies elsewhere is mapped when it is first read, for which this process has to be there.
  operation.completed = !operation.staged || message_of(rank_, operation.number).place.block == 0;
  if (operation.completed) operation.output = at::Tensor();
}

void HostChannel::sum_share(HostOperation& operation) {
  const at::Tensor& tensor = operation.output;
  char* const data = static_cast<char*>(tensor.mutable_data_ptr());
  for (int peer = 0; peer < size_; ++peer) {
    const HostPlace& place = message_of(peer, operation.number).place;
    operation.messages.push_back(peer == rank_ ? data : peers_[peer].memory->at(place));
  }
  const auto [begin, end] = share_of(rank_, tensor.numel(), tensor.element_size());
  std::vector<char*> shares;
  for (char* message : operation.messages) shares.push_back(message + begin);
  combine(operation.op, tensor.scalar_type(), (end - begin) / tensor.element_size(),
          {shares.begin(), shares.end()}, shares);
}

/// The peers' shares, which lie in the copy, if there is one.
void HostChannel::take_shares(const HostOperation& operation) const {
  if (!operation.staged) return;
  char* const data = static_cast<char*>(operation.output.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(operation.output.nbytes());
  const auto [begin, end] =
      share_of(rank_, operation.output.numel(), operation.output.element_size());
  std::memcpy(data, operation.message, static_cast<size_t>(begin));
  std::memcpy(data + end, operation.message + end, static_cast<size_t>(bytes - end));
}

// --- waiting ---

/// Whether `operation` waits for that peer.
bool HostChannel::owes(int peer, const HostOperation& operation) const {
  const auto has = [&](std::atomic<uint64_t> Control::*what, uint64_t number) {
    return (controls_[peer]->*what).load(std::memory_order_acquire) > number;
  };
  // Parts are done in order: what comes before `operation` may be what holds it up.
  for (const auto& before : pending_) {
    if (before->number > operation.number) break;
    if (before->state == HostOperation::State::kPosted)
      return !has(&Control::posted, before->number);
  }
  return !has(&Control::summed, operation.number);
}

/// The first peer that `operation` waits for, or -1.
int HostChannel::behind(const HostOperation& operation) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && owes(peer, operation)) return peer;
  }
  return -1;
}

bool HostChannel::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
                       const HostOperation& operation, Clock::time_point until) {
  Clock::time_point spin_until = Clock::now() + (spins_ ? kSpin : microseconds(0));
  for (;;) {
    require_usable();
    advance();
    if (done()) return true;
    const Clock::time_point now = Clock::now();
    if (now >= until) return false;
    if (now < spin_until) {
      for (int i = 0; i < 32; ++i) relax();
      continue;
    }
    // The bell first: what it announces is looked at after that, or else it has been rung since.
    std::vector<uint32_t> bells;
    for (const Control* control : controls_) bells.push_back(control->bell.load());
    const int peer = behind(operation);
    if (peer < 0 || peer == rank_) continue;
    check_ends(operation);
    Control& other = *controls_[peer];
    other.sleepers.fetch_add(1);
    lock.unlock();
    sleep_on(other.bell, bells[peer], std::min<std::chrono::nanoseconds>(kNap, until - now));
    lock.lock();
    other.sleepers.fetch_sub(1);
    if (Clock::now() - now >= kNap / 2) check_ends(operation, /*processes=*/true);
  }
}

/// Fails if a peer that `operation` waits for will not do its part any more.
void HostChannel::check_ends(const HostOperation& operation, bool processes) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::string name = "rank " + std::to_string(peer);
    std::string end;
    switch (controls_[peer]->end.load()) {
      case End::kNone: break;
      case End::kFailed: end = name + " reports that a collective of this group has failed"; break;
      case End::kLeft: end = name + " has let go of the group"; break;
    }
    const auto& process = peers_[peer].process;
    if (end.empty() && processes && process && state_of(*process) == ProcessState::kEnded)
      end = name + ", process " + std::to_string(process->pid) + " of this host, has ended";
    // Asked for last: it may have done its part just before.
    if (!end.empty() && owes(peer, operation)) fail(end);
  }
}

void HostChannel::fail(const std::string& why) {
  failure_ = why;
  tell_end(End::kFailed);
  throw Error(why);
}

// --- HostWork ---

HostWork::HostWork(std::shared_ptr<HostChannel> channel, std::shared_ptr<HostOperation> operation)
    : Work(channel->rank_, c10d::OpType::UNKNOWN),
      channel_(std::move(channel)),
      operation_(std::move(operation)) {}

bool HostWork::isCompleted() {
  const std::lock_guard<std::mutex> lock(channel_->mutex_);
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

bool HostWork::wait_for(milliseconds slice) {
  std::unique_lock<std::mutex> lock(channel_->mutex_);
  if (operation_->completed) return true;
  const Clock::time_point now = Clock::now();
  if (!deadline_) deadline_ = now + channel_->timeout_;
  const auto done = [&] { return operation_->completed; };
  if (channel_->wait(lock, done, *operation_, std::min(now + slice, *deadline_))) return true;
  if (Clock::now() < *deadline_) return false;
  const int peer = channel_->behind(*operation_);
  channel_->fail("timed out after " + std::to_string(channel_->timeout_.count()) +
                 " ms waiting for rank " + std::to_string(peer));
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
