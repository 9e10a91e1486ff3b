// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_backend.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <apex/distributed.h>
#include <apex/error.h>

#include "endings.h"
#include "error_text.h"
#include "tensor_memory.h"
#include "transport/host_channel.h"
#include "transport/host_hierarchy.h"
#include "transport/host_topology.h"
#include "watch/process_state.h"

namespace apex::parallel {

namespace {

using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Whether the channel can read and write these tensors. Refuses tensors that are not contiguous
/// even if Gloo carries them, which takes other elements instead.
bool in_host_memory(const char* title, const Tensors& inputs, const Tensors& outputs) {
  bool all = true;
  for (const Tensors* const tensors : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      const bool strided = tensor.layout() == at::kStrided;
      TORCH_CHECK_VALUE(
          !strided || (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()), title,
          ": tensors must be contiguous");
      all = all && strided && tensor.is_cpu() && has_memory(tensor);
    }
  }
  return all;
}

c10::intrusive_ptr<c10d::Backend::Options> options_of(const distributed::BackendRequest& request) {
  auto options = c10::make_intrusive<c10d::Backend::Options>(HostBackend::kName, request.timeout);
  options->group_name = request.group_name;
  options->global_ranks_in_group = request.global_ranks;
  return options;
}

const at::Tensor& only(const Tensors& tensors, const std::string& what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, ": takes one tensor, got ", tensors.size());
  return tensors.front();
}

/// The average of a sum, divided on completion. (The wait() of c10d::Work::create_from_future()
/// throws no error of the future.)
class Average final : public c10d::Work {
 public:
  static WorkPtr of(const WorkPtr& sum, const Tensors& tensors, int ranks) {
    const auto divide = [tensors, ranks](c10::ivalue::Future& done) {
      if (done.hasError()) std::rethrow_exception(done.exception_ptr());
      const at::AutoDispatchBelowADInplaceOrView guard;
      const at::NoGradGuard no_grad;
      for (const at::Tensor& tensor : tensors) tensor.div_(ranks);
      return c10::IValue(tensors);
    };
    auto work = c10::make_intrusive<Average>();
    work->tensors_ = tensors;
    work->future_ = sum->getFuture()->then(divide, c10::ListType::create(c10::TensorType::get()));
    work->future_->addCallback([work](c10::ivalue::Future& done) {
      work->finish(done.hasError() ? done.exception_ptr() : nullptr);
    });
    return work;
  }
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Returns the only list in `lists`, which has a tensor for each rank.
const Tensors& only_list(const std::vector<Tensors>& lists, int ranks, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1, what, ": takes one list of tensors, got ", lists.size());
  const Tensors& list = lists.front();
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(ranks), what, ": a list of ", list.size(),
                    " tensors for ", ranks, " ranks");
  return list;
}

}  // namespace

HostBackend::HostBackend(const distributed::BackendRequest& request,
                         c10::intrusive_ptr<Backend> gloo, HostLinks links)
    : Backend(request.rank, request.size),
      options_(options_of(request)),
      shares_memory_(links.channel && !links.column),
      sums_by_host_(links.column),
      processes_(std::move(links.processes)),
      links_(std::move(links)) {
  links_.gloo = std::move(gloo);
}

void HostBackend::shutdown() {
  if (this_pid() != pid_) {
    // Forked: the threads that Gloo would join do not exist.
    links_.gloo.release();
    links_.column.release();
    return;
  }
  HostLinks links;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(links, links_);
  }
  if (!links.gloo && !links.channel) return;  // it has ended before
  // What is in flight is completed first. See also Note [Where a group ends].
  end_elsewhere(
      [links = std::move(links)]() mutable {
        if (links.channel) links.channel->drain();
        links = HostLinks();
      },
      /*may_be_stuck=*/true);
}

HostLinks HostBackend::links() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return links_;
}

c10::intrusive_ptr<c10d::Backend> HostBackend::gloo() const {
  c10::intrusive_ptr<Backend> gloo = gloo_or_null();
  if (!gloo)
    throw Error("the process group was destroyed, or has no connections but shared memory");
  return gloo;
}

std::shared_ptr<HostChannel> HostBackend::channel() const {
  std::shared_ptr<HostChannel> channel = links().channel;
  if (!channel) throw Error("the process group was destroyed");
  return channel;
}

void HostBackend::setTimeout(milliseconds timeout) {
  options_->timeout = timeout;
  timeout_ = timeout;
  gloo()->setTimeout(timeout);
}

void HostBackend::abort() {
  give_up("its group was aborted");
  if (const auto gloo = links().gloo) gloo->abort();
}

void HostBackend::give_up(const std::string& why) noexcept {
  if (const auto channel = links().channel) channel->give_up(why);
}

c10::intrusive_ptr<c10d::Backend> HostBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  distributed::BackendRequest request;
  request.group_name = options ? options->group_name : std::string();
  request.store = c10::make_intrusive<c10d::PrefixStore>(request.group_name + "/", store);
  request.rank = static_cast<int>(found - ranks.begin());
  request.size = static_cast<int>(ranks.size());
  request.timeout = options ? options->timeout : options_->timeout;
  const std::vector<uint64_t>& parents = options_->global_ranks_in_group;
  for (const int rank : ranks) {
    request.global_ranks.push_back(parents.empty() ? static_cast<uint64_t>(rank)
                                                   : parents.at(static_cast<size_t>(rank)));
  }
  return make_host_backend(request);
}

at::Tensor HostBackend::allocateTensor(long size, at::TensorOptions options) {
  const auto channel = links().channel;
  return channel ? channel->allocate(size, options) : at::zeros({size}, options);
}

// --- issuing collectives ---

bool HostBackend::can_all_reduce(const at::Tensor& tensor, Op op) const {
  if (sums_by_host_) return can_sum_over_hosts(tensor, op);
  return shares_memory_ && HostChannel::can_all_reduce(tensor, op);
}

HostChannel::WorkPtr HostBackend::all_reduce(HostCall call, const at::Tensor& tensor, Op op) {
  HostLinks links = this->links();
  if (!links.channel) throw Error("the process group was destroyed");
  HostChannel::JobPtr job =
      links.column ? sum_over_hosts(links.channel, std::move(links.column), call.what, tensor, op)
                   : links.channel->summing(call.what, tensor, op);
  return links.channel->issue(std::move(call), std::move(job));
}

template <typename CallOptions>
HostCall HostBackend::begin(c10d::OpType type, const char* title, const CallOptions& options,
                            Tensors inputs, Tensors outputs) {
  HostCall call(title);
  call.waits_at_once = !options.asyncOp;
  call.timeout = options.timeout == c10d::kUnsetTimeout ? timeout_.load() : options.timeout;
  call.type = type;
  call.profiled_as = title;
  call.number = ++issued_;
  call.inputs = std::move(inputs);
  call.outputs = std::move(outputs);
  return call;
}

WorkPtr HostBackend::barrier(const c10d::BarrierOptions& options) {
  if (!shares_memory()) return gloo()->barrier(options);
  return channel()->all_reduce(begin(c10d::OpType::BARRIER, "apex:barrier", options, {}, {}),
                               at::zeros({1}, at::kByte), Op::SUM);
}

WorkPtr HostBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  constexpr const char* kTitle = "apex:all_reduce";
  if (tensors.size() != 1) return gloo()->allreduce(tensors, options);
  const at::Tensor& tensor = tensors.front();
  const Op asked = options.reduceOp;
  TORCH_CHECK_VALUE(asked != Op::AVG || tensor.is_floating_point() || tensor.is_complex(), kTitle,
                    ": there is no average of ", tensor.scalar_type());
  if (in_host_memory(kTitle, tensors, {}) && can_all_reduce(tensor, asked)) {
    return all_reduce(begin(c10d::OpType::ALLREDUCE, kTitle, options, tensors, tensors), tensor,
                      asked);
  }
  if (asked != Op::AVG) return gloo()->allreduce(tensors, options);
  c10d::AllreduceOptions sum = options;
  sum.reduceOp = Op::SUM;
  return Average::of(allreduce(tensors, sum), tensors, size_);
}

WorkPtr HostBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  constexpr const char* kTitle = "apex:broadcast";
  const at::Tensor& tensor = only(tensors, kTitle);
  TORCH_CHECK_VALUE(options.rootRank >= 0 && options.rootRank < size_, kTitle,
                    ": invalid root rank: ", options.rootRank, " of ", size_);
  if (!in_host_memory(kTitle, tensors, {}) || !shares_memory())
    return gloo()->broadcast(tensors, options);
  HostCall call = begin(c10d::OpType::BROADCAST, kTitle, options, tensors, tensors);
  return channel()->broadcast(std::move(call), tensor, options.rootRank);
}

WorkPtr HostBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& options) {
  constexpr const char* kTitle = "apex:all_gather";
  const at::Tensor& input = only(inputs, kTitle);
  const Tensors& list = only_list(outputs, size_, kTitle);
  if (!in_host_memory(kTitle, inputs, list) || !shares_memory())
    return gloo()->allgather(outputs, inputs, options);
  HostCall call = begin(c10d::OpType::ALLGATHER, kTitle, options, inputs, list);
  return channel()->all_gather(std::move(call), list, input);
}

WorkPtr HostBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& options) {
  constexpr const char* kTitle = "apex:_all_gather_base";
  if (!in_host_memory(kTitle, {input}, {output}) || !shares_memory())
    return gloo()->_allgather_base(output, input, options);
  HostCall call = begin(c10d::OpType::_ALLGATHER_BASE, kTitle, options, {input}, {output});
  return channel()->all_gather(std::move(call), {output}, input);
}

WorkPtr HostBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  constexpr const char* kTitle = "apex:reduce_scatter";
  const at::Tensor& output = only(outputs, kTitle);
  const Tensors& list = only_list(inputs, size_, kTitle);
  if (!in_host_memory(kTitle, list, outputs) || !shares_memory() ||
      !HostChannel::can_all_reduce(output, options.reduceOp))
    return gloo()->reduce_scatter(outputs, inputs, options);
  HostCall call = begin(c10d::OpType::REDUCE_SCATTER, kTitle, options, list, outputs);
  return channel()->reduce_scatter(std::move(call), output, list, options.reduceOp);
}

WorkPtr HostBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  constexpr const char* kTitle = "apex:_reduce_scatter_base";
  if (!in_host_memory(kTitle, {input}, {output}) || !shares_memory() ||
      !HostChannel::can_all_reduce(output, options.reduceOp))
    return gloo()->_reduce_scatter_base(output, input, options);
  HostCall call = begin(c10d::OpType::_REDUCE_SCATTER_BASE, kTitle, options, {input}, {output});
  return channel()->reduce_scatter(std::move(call), output, {input}, options.reduceOp);
}

c10::intrusive_ptr<HostBackend> make_host_backend(const distributed::BackendRequest& request) {
  auto gloo = distributed::make_gloo_backend(request);
  HostLinks links = connect_host(*gloo, gloo, request.store, request.timeout);
  return c10::make_intrusive<HostBackend>(request, std::move(gloo), std::move(links));
}

}  // namespace apex::parallel

namespace apex::distributed {

void add_host_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      std::chrono::milliseconds timeout, const std::string& name,
                      const std::vector<uint64_t>& global_ranks) {
  if (!group || !group->getStore())
    throw InvalidArgument("add_host_backend(): the group is null or has no store");
  if (timeout.count() <= 0) {
    throw InvalidArgument("add_host_backend(): the timeout is " + std::to_string(timeout.count()) +
                          " ms, but it must be positive");
  }
  BackendRequest request;
  request.store = group->getStore();
  request.rank = group->getRank();
  request.size = group->getSize();
  request.timeout = std::min<std::chrono::milliseconds>(timeout, kLongestTimeout);
  request.group_name = name;
  request.global_ranks = global_ranks;
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = parallel::make_host_backend(request);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommunicationError(parallel::rank_of(request.rank, request.size) +
                             " could not connect to the other ranks of its group within " +
                             std::to_string(request.timeout.count()) +
                             " ms: check that all of them were started, that none has failed, and "
                             "that the machines reach each other (" +
                             parallel::message_of(std::current_exception()) + ")");
  }
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
}

}  // namespace apex::distributed
