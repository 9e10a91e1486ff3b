// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_channel.h"

#include <sched.h>

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

// Creates a channel and describes collectives. host_channel_run.cpp runs them.

namespace apex::parallel {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;

/// Up to this size every rank sums the whole message: one exchange instead of two.
constexpr int64_t kWhole = int64_t{16} << 10;
/// How long a rank that waits spins before it sleeps, if there is a processor for each rank.
constexpr microseconds kSpin{50};

int processors() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

/// A tensor that keeps `memory` alive.
at::Tensor tensor_on(std::shared_ptr<char> memory, int64_t numel,
                     const at::TensorOptions& options) {
  void* const data = memory.get();
  return at::from_blob(
      data, {numel}, [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
}

at::Tensor real_of(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

}  // namespace

std::shared_ptr<HostMemory> HostChannel::make_memory(size_t bytes) {
  static_assert(std::is_trivially_copyable_v<Message>);
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
  queue_->close();
  if (!queue_->has_failed()) tell_end(End::kLeft, "");
}

bool HostChannel::can_all_reduce(const at::Tensor& tensor, Op op) {
  if (tensor.is_complex()) return op == Op::SUM || op == Op::AVG;
  return can_combine(op, tensor.scalar_type());
}

at::Tensor HostChannel::allocate(int64_t numel, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  return tensor_on(memory_->allocate_zeroed(bytes), numel, options);
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
  const at::Tensor real = real_of(received);
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

HostChannel::WorkPtr HostChannel::broadcast(HostCall call, std::vector<at::Tensor> parts,
                                            int64_t root,
                                            std::shared_ptr<std::vector<uint8_t>> changed) {
  const bool one = parts.size() == 1 && !changed;
  auto operation = describe(call.what, Kind::kBroadcast, one ? parts[0] : at::Tensor());
  operation->message.root = static_cast<int32_t>(root);
  if (root == rank_) operation->sent = parts;
  operation->parts = std::move(parts);
  operation->changed = std::move(changed);
  if (!one) {
    for (const at::Tensor& part : operation->parts)
      operation->message.numel += static_cast<int64_t>(part.nbytes());
  }
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
  auto operation = describe(call.what, Kind::kAllGather, share);
  operation->sent = {share};
  operation->parts = std::move(gathered);
  return issue(std::move(call), std::move(operation));
}

HostChannel::JobPtr HostChannel::gathering(const std::string& what, std::vector<at::Tensor> parts) {
  const at::Tensor& own = parts[static_cast<size_t>(rank_)];
  auto operation = describe(what, Kind::kAllGather, own);
  operation->message.numel = 0;
  for (const at::Tensor& part : parts) operation->message.numel += part.numel();
  operation->sent = {own};
  operation->parts = std::move(parts);
  return operation;
}

}  // namespace apex::parallel
