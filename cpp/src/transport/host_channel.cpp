// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_channel.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <type_traits>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <apex/error.h>

#include "error_text.h"
#include "plain_text.h"
#include "transport/host_protocol.h"
#include "transport/host_sum.h"

// Creates a channel and issues collectives. host_channel_parts.cpp makes progress on them, and
// host_channel_wait.cpp waits.

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;

/// Up to this size every rank sums the whole message: one exchange instead of two.
constexpr int64_t kWhole = int64_t{16} << 10;

int processors() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

/// The channels of this process. Never destroyed.
struct AllChannels {
  std::mutex mutex;
  std::vector<HostChannel*> channels;
};

AllChannels& all_channels() {
  static auto* const instance = new AllChannels;
  return *instance;
}

/// A tensor that keeps `memory` alive.
at::Tensor tensor_on(std::shared_ptr<char> memory, int64_t numel,
                     const at::TensorOptions& options) {
  void* const data = memory.get();
  return at::from_blob(
      data, {numel}, [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
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
  // In a forked process, a thread that does not exist may hold a mutex.
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
  return tensor_on(memory_->allocate_zeroed(bytes), numel, options);
}

/// Advances the channels of this process other than `but`; returns whether any has pending work.
bool HostChannel::advance_others(const HostChannel* but) {
  std::vector<at::Tensor> released;  // released while no mutex is held: see Held
  const std::lock_guard<std::mutex> lock(all_channels().mutex);
  bool more = false;
  for (HostChannel* const channel : all_channels().channels) {
    if (channel == but || channel->pid_ != this_pid()) continue;
    const Lock other(channel->mutex_, std::try_to_lock);
    if (!other) continue;  // the thread that holds it makes progress
    try {
      if (channel->failure_.empty()) channel->advance(/*helps=*/true);
    } catch (const std::exception&) {
      // The callers that wait on that channel get the error.
    }
    for (at::Tensor& tensor : channel->released_) released.push_back(std::move(tensor));
    channel->released_.clear();
    more = more || (channel->failure_.empty() && !channel->pending_.empty());
  }
  return more;
}

void advance_host_channels() { HostChannel::advance_others(nullptr); }

// --- issuing ---

HostChannel& HostChannel::in_this_process() {
  if (this_pid() != pid_) throw_forked();
  return *this;
}

void HostChannel::require_usable() const {
  if (!failure_.empty()) throw Error("an earlier collective of this group failed: " + failure_);
}

/// Allocates memory for peers to read and returns its location. Prefers the first block, which all
/// peers have mapped, so that it stays readable after this process has exited.
HostPlace HostChannel::stage(Operation& operation, size_t bytes) {
  operation.staged = memory_->allocate(bytes, /*in_first=*/true);
  if (!operation.staged) operation.staged = memory_->allocate(bytes);
  return *memory_->place_of(operation.staged.get(), bytes);
}

/// A copy of all `parts` in such memory, one after another.
HostPlace HostChannel::stage_copy(Operation& operation, const std::vector<at::Tensor>& parts) {
  size_t bytes = 0;
  for (const at::Tensor& part : parts) bytes += part.nbytes();
  const HostPlace place = stage(operation, bytes);
  char* to = operation.staged.get();
  for (const at::Tensor& part : parts) {
    copy_bytes(to, part.const_data_ptr(), part.nbytes());
    to += part.nbytes();
  }
  return place;
}

/// Describes a collective in which each rank's message has the size and dtype of `each`.
HostChannel::Message HostChannel::describe(HostKind kind, const at::Tensor& each, int64_t root) {
  Message message;
  message.kind = kind;
  message.root = static_cast<int32_t>(root);
  message.dtype = each.scalar_type();
  message.numel = each.numel();
  return message;
}

HostChannel::WorkPtr HostChannel::post(std::shared_ptr<Operation> operation, Message message) {
  operation->number = next_++;
  operation->kind = message.kind;
  operation->op = message.op;
  operation->root = message.root;
  operation->keeps_part = message.keeps_part;
  const std::string said = in_common(operation->what);
  copy_bytes(message.what, said.data(), character_before(said, sizeof(message.what) - 1));
  APEX_HOST_STEP("message written");
  operation->message = std::make_unique<Message>(message);
  pending_.push_back(operation);
  advance();
  return c10::make_intrusive<HostWork>(shared_from_this(), std::move(operation));
}

HostChannel::WorkPtr HostChannel::all_reduce(const std::string& what, const at::Tensor& tensor,
                                             Op op) {
  const Held held(*this);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
    operation->output = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  }
  const at::Tensor& real = operation->output;
  char* data = static_cast<char*>(real.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(real.nbytes());
  operation->bytes = bytes;
  Message message = describe(HostKind::kSumWhole, real, 0);
  message.op = op;
  if (bytes <= kWhole) {
    message.place = stage_copy(*operation, {real});
  } else {
    message.kind = HostKind::kSumShares;
    const auto place = memory_->place_of(data, static_cast<size_t>(bytes));
    message.keeps_part = !place;
    message.place = place ? *place : stage(*operation, static_cast<size_t>(bytes));
    if (char* const copy = operation->staged.get()) {
      const auto [begin, end] = part_of(rank_, bytes);
      copy_bytes(copy, data, static_cast<size_t>(begin));
      copy_bytes(copy + end, data + end, static_cast<size_t>(bytes - end));
    }
  }
  return post(std::move(operation), message);
}

HostChannel::WorkPtr HostChannel::broadcast(const std::string& what, std::vector<at::Tensor> parts,
                                            int64_t root,
                                            std::shared_ptr<std::vector<uint8_t>> changed) {
  const Held held(*this);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->parts = std::move(parts);
  operation->changed = std::move(changed);
  Message message;
  message.kind = HostKind::kBroadcast;
  message.root = static_cast<int32_t>(root);
  size_t bytes = 0;
  for (const at::Tensor& part : operation->parts) bytes += part.nbytes();
  message.numel = static_cast<int64_t>(bytes);
  if (!operation->changed && operation->parts.size() == 1) {
    message.dtype = operation->parts.front().scalar_type();
    message.numel = operation->parts.front().numel();
  }
  if (root == rank_) message.place = stage_copy(*operation, operation->parts);
  return post(std::move(operation), message);
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

HostChannel::WorkPtr HostChannel::all_gather(const std::string& what,
                                             std::vector<at::Tensor> gathered,
                                             const at::Tensor& share) {
  require_shares(what, gathered, share);
  return issue_gather(what, HostKind::kAllGather, std::move(gathered), share, 0);
}

HostChannel::WorkPtr HostChannel::gather(const std::string& what, std::vector<at::Tensor> gathered,
                                         const at::Tensor& share, int64_t root) {
  if (root == rank_) require_shares(what, gathered, share);
  return issue_gather(what, HostKind::kGather, std::move(gathered), share, root);
}

HostChannel::WorkPtr HostChannel::issue_gather(const std::string& what, HostKind kind,
                                               std::vector<at::Tensor> gathered,
                                               const at::Tensor& share, int64_t root) {
  const Held held(*this);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->parts = std::move(gathered);
  Message message = describe(kind, share, root);
  message.place = stage_copy(*operation, {share});
  return post(std::move(operation), message);
}

HostChannel::WorkPtr HostChannel::scatter(const std::string& what, const at::Tensor& received,
                                          const std::vector<at::Tensor>& sent, int64_t root) {
  if (root == rank_) require_shares(what, sent, received);
  const Held held(*this);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  operation->output = received;
  Message message = describe(HostKind::kScatter, received, root);
  if (root == rank_) {
    std::vector<at::Tensor> shares =
        sent.size() == 1 ? sent.front().view({size_, received.numel()}).unbind() : sent;
    const at::Tensor own = shares[rank_];
    shares.erase(shares.begin() + rank_);
    message.place = stage_copy(*operation, shares);
    if (own.numel() > 0)  // source and destination may overlap
      std::memmove(received.mutable_data_ptr(), own.const_data_ptr(), own.nbytes());
  }
  return post(std::move(operation), message);
}

HostChannel::WorkPtr HostChannel::reduce(const std::string& what, const at::Tensor& tensor, Op op,
                                         int64_t root) {
  return issue_reduce(what, HostKind::kReduce, tensor, {tensor}, op, root);
}

HostChannel::WorkPtr HostChannel::reduce_scatter(const std::string& what,
                                                 const at::Tensor& received,
                                                 const std::vector<at::Tensor>& sent, Op op) {
  require_shares(what, sent, received);
  return issue_reduce(what, HostKind::kReduceScatter, received, sent, op, 0);
}

HostChannel::WorkPtr HostChannel::issue_reduce(const std::string& what, HostKind kind,
                                               const at::Tensor& received,
                                               const std::vector<at::Tensor>& sent, Op op,
                                               int64_t root) {
  const Held held(*this);
  require_usable();
  auto operation = std::make_shared<HostOperation>();
  operation->what = what;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
    operation->output = received.is_complex() ? at::view_as_real(received) : received;
  }
  Message message = describe(kind, operation->output, root);
  message.op = op;
  message.place = stage_copy(*operation, sent);
  return post(std::move(operation), message);
}

HostChannel::WorkPtr HostChannel::all_to_all(const std::string& what, const at::Tensor& received,
                                             const at::Tensor& sent,
                                             const std::vector<int64_t>& received_numel,
                                             const std::vector<int64_t>& sent_numel) {
  const Held held(*this);
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
  operation->received = bytes_of(received, received_numel);
  const std::vector<int64_t> lengths = bytes_of(sent, sent_numel);
  const int64_t own = lengths[rank_];
  // The byte count for each rank, then the data, except for this rank's own.
  const size_t head = sizeof(int64_t) * static_cast<size_t>(size_);
  const auto before = [&](const std::vector<int64_t>& bytes) {
    return std::accumulate(bytes.begin(), bytes.begin() + rank_, int64_t{0});
  };
  const char* const data = static_cast<const char*>(sent.const_data_ptr());
  const auto begin = static_cast<size_t>(before(lengths)), end = begin + static_cast<size_t>(own);
  Message message;
  message.kind = HostKind::kAllToAll;
  message.dtype = sent.scalar_type();
  message.place = stage(*operation, head + sent.nbytes() - static_cast<size_t>(own));
  char* const staged = operation->staged.get();
  copy_bytes(staged, lengths.data(), head);
  copy_bytes(staged + head, data, begin);
  copy_bytes(staged + head + begin, data + end, sent.nbytes() - end);
  if (own == operation->received[rank_]) {  // else begin() reports the mismatch
    char* const to = static_cast<char*>(received.mutable_data_ptr()) + before(operation->received);
    if (own > 0) std::memmove(to, data + begin, static_cast<size_t>(own));  // may overlap
  }
  return post(std::move(operation), message);
}

}  // namespace apex::parallel
