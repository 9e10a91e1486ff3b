// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_backend.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <type_traits>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <apex/distributed/host_backend.h>
#include <apex/error.h>

#include "comm/endings.h"
#include "comm/error_text.h"
#include "comm/host_channel.h"
#include "comm/host_hierarchy.h"
#include "comm/host_topology.h"
#include "comm/named_collective.h"
#include "tensor_memory.h"
#include "torch_version.h"
#include "transport/backend_work.h"
#include "watch/process_state.h"

namespace apex::parallel {

namespace {

using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr const char* kAllToAll = "apex:all_to_all";

/// Maps `one` over the tensors.
template <typename One>
auto each(const Tensors& tensors, One&& one) {
  std::vector<std::decay_t<decltype(one(tensors.front()))>> all;
  for (const at::Tensor& tensor : tensors) all.push_back(one(tensor));
  return all;
}

Tensors alone(const at::Tensor& tensor) { return {tensor}; }
at::Tensor flat(const at::Tensor& tensor) { return in_order(tensor).view({-1}); }
int64_t numel(const at::Tensor& tensor) { return tensor.numel(); }

Tensors concat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

int64_t sum_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

bool in_host_memory(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided && has_memory(tensor);
  });
}

bool can_reduce(const Tensors& tensors, Op op) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return HostChannel::can_all_reduce(tensor, op);
  });
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

/// Returns the only list in `lists`, which has a tensor for each rank.
const Tensors& only_list(const std::vector<Tensors>& lists, int ranks, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1, what, ": takes one list of tensors, got ", lists.size());
  const Tensors& list = lists.front();
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(ranks), what, ": a list of ", list.size(),
                    " tensors for ", ranks, " ranks");
  return list;
}

/// Checks `sizes`, the number of rows of a tensor for each rank; empty means equal shares.
void require_split(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int ranks) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, kAllToAll, ": a negative split size, ", size);
  }
  TORCH_CHECK_VALUE(sizes.empty() || sizes.size() == static_cast<size_t>(ranks), kAllToAll, ": ",
                    sizes.size(), " sizes for ", ranks, " ranks");
  TORCH_CHECK_VALUE(sizes.empty() ? rows % ranks == 0 : sum_of(sizes) == rows, kAllToAll,
                    ": a tensor of ", rows, " rows is not split by these sizes over ", ranks,
                    " ranks");
}

void require_pairs(size_t outputs, size_t inputs, const char* what) {
  TORCH_CHECK_VALUE(outputs == inputs, what, ": ", outputs, " outputs for ", inputs, " inputs");
}

}  // namespace

HostBackend::HostBackend(const distributed::BackendRequest& request,
                         c10::intrusive_ptr<Backend> gloo, HostLinks links)
    : Backend(request.rank, request.size),
      options_(options_of(request)),
      shares_memory_(links.channel != nullptr),
      sums_by_host_(links.hierarchy != nullptr),
      works_(std::make_shared<BackendWorks>()),
      gloo_(std::move(gloo)),
      links_(std::move(links)) {}

void HostBackend::end(bool may_be_stuck) {
  if (this_pid() != pid_) {
    // Forked: the threads that Gloo would join do not exist.
    gloo_.release();
    return;
  }
  works_->end();
  HostLinks links;  // destroyed after the lock is released
  c10::intrusive_ptr<Backend> gloo;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(links, links_);
    gloo.swap(gloo_);
  }
  // Note [Where a group ends].
  if (gloo) end_elsewhere([gloo = std::move(gloo)]() mutable { gloo.reset(); }, may_be_stuck);
}

c10::intrusive_ptr<c10d::Backend> HostBackend::gloo() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!gloo_)
    throw Error("the process group was destroyed, or has no connections but shared memory");
  return gloo_;
}

HostLinks HostBackend::links() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return links_;
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
  constexpr const char* kWhy = "its group was aborted";
  if (const auto channel = links().channel) channel->give_up(kWhy);
  give_up(kWhy);
  c10::intrusive_ptr<Backend> gloo;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    gloo = gloo_;
  }
  if (gloo) gloo->abort();
}

void HostBackend::give_up(const std::string& why) noexcept {
  if (const auto hierarchy = links().hierarchy) hierarchy->give_up(why);
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
  const HostLinks links = this->links();
  if (links.channel) return links.channel->allocate(size, options);
  if (links.hierarchy) return links.hierarchy->allocate(size, options);
  return at::zeros({size}, options);
}

// --- issuing collectives ---

BackendWorkPtr HostBackend::begin(c10d::OpType type, const char* title, milliseconds timeout,
                                  const Tensors& inputs, Tensors outputs) {
  if (timeout == c10d::kUnsetTimeout) timeout = timeout_;
  return c10::make_intrusive<BackendWork>(rank_, type, title, NamedCollective::current(title),
                                          ++issued_, timeout, inputs, std::move(outputs), works_);
}

/// Whether a collective of these tensors uses the channel.
bool HostBackend::in_memory(const Tensors& tensors) const {
  return shares_memory() && in_host_memory(tensors);
}

bool HostBackend::averages() const {
  if (!sums_by_host_) return shares_memory_;
  const auto hierarchy = links().hierarchy;
  return hierarchy && hierarchy->averages();
}

bool HostBackend::can_all_reduce(const at::Tensor& tensor, Op op) const {
  return (shares_memory() || sums_by_host()) && HostChannel::can_all_reduce(tensor, op);
}

bool HostBackend::is_root(int64_t root, const std::string& what) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, what, ": there is no rank ", root, " of ", size_);
  return root == rank_;
}

/// The root's list with a tensor for each rank; empty on other ranks.
Tensors HostBackend::list_of_root(const std::vector<Tensors>& lists, int64_t root,
                                  const char* what) const {
  if (is_root(root, what)) return only_list(lists, size_, what);
  TORCH_CHECK_VALUE(lists.empty(), what, ": only rank ", root, " has a list of tensors");
  return {};
}

WorkPtr HostBackend::barrier(const c10d::BarrierOptions& options) {
  auto work = begin(c10d::OpType::BARRIER, "apex:barrier", options.timeout, {}, {});
  if (shares_memory()) {
    work->add(channel()->all_reduce(work->what(), at::zeros({1}, at::kByte), Op::SUM));
  } else {
    work->add(gloo()->barrier(options));
  }
  return work;
}

void HostBackend::add_all_reduce(BackendWork& work, const at::Tensor& tensor, Op op) {
  if (shares_memory()) return work.add(channel()->all_reduce(work.what(), tensor, op));
  const auto hierarchy = links().hierarchy;
  if (!hierarchy) throw Error("the process group was destroyed");
  const bool divides = op == Op::AVG && !hierarchy->averages();
  if (divides) work.divide_later(size_);
  work.add(hierarchy->all_reduce(work.what(), tensor, divides ? Op::SUM : op));
}

/// Several tensors are sent in one message.
WorkPtr HostBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  constexpr const char* kTitle = "apex:all_reduce";
  TORCH_CHECK_VALUE(!tensors.empty(), kTitle, ": takes a tensor");
  const Op op = options.reduceOp;
  const at::Tensor& first = tensors.front();
  const bool here =
      (shares_memory() || sums_by_host()) && in_host_memory(tensors) && can_reduce(tensors, op);
  // Gloo's allreduce() of several tensors sums across them; the coalesced one does not. No AVG in
  // Gloo.
  const auto by_gloo = [&] {
    c10d::AllreduceCoalescedOptions sums;
    static_cast<c10d::AllreduceOptions&>(sums) = options;
    if (op == Op::AVG) sums.reduceOp = c10d::ReduceOp::SUM;
    return tensors.size() == 1 ? gloo()->allreduce(tensors, sums)
                               : gloo()->allreduce_coalesced(tensors, sums);
  };
  if (!here && op != Op::AVG) return by_gloo();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(here || tensor.is_floating_point() || tensor.is_complex(), kTitle,
                      ": there is no average of ", tensor.scalar_type());
    TORCH_CHECK_TYPE(!here || tensor.scalar_type() == first.scalar_type(), kTitle, ": tensors of ",
                     tensor.scalar_type(), " and ", first.scalar_type());
  }
  auto work = begin(c10d::OpType::ALLREDUCE, kTitle, options.timeout, tensors, tensors);
  if (!here) {
    work->add(by_gloo());
    work->divide_later(size_);
  } else if (tensors.size() == 1) {
    add_all_reduce(*work, work->output(first, /*with_elements=*/true), op);
  } else {
    const at::AutoDispatchBelowADInplaceOrView guard;
    at::Tensor all = allocateTensor(sum_of(each(tensors, numel)), first.options());
    at::cat_out(all, each(tensors, flat));
    work->split_later(all, tensors);
    add_all_reduce(*work, all, op);
  }
  return work;
}

WorkPtr HostBackend::broadcast_changes(const Tensors& parts, int64_t root,
                                       const std::shared_ptr<std::vector<uint8_t>>& changed) {
  auto work = begin(c10d::OpType::BROADCAST, "apex:broadcast", c10d::kUnsetTimeout, parts, parts);
  work->add(channel()->broadcast(work->what(), parts, root, changed));
  return work;
}

WorkPtr HostBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (!in_memory(tensors)) return gloo()->broadcast(tensors, options);
  auto work = begin(c10d::OpType::BROADCAST, "apex:broadcast", options.timeout, tensors, tensors);
  const at::Tensor& tensor = only(tensors, work->what());
  const at::Tensor to =
      is_root(options.rootRank, work->what()) ? in_order(tensor) : work->output(tensor);
  work->add(channel()->broadcast(work->what(), {to}, options.rootRank));
  return work;
}

WorkPtr HostBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (!in_memory(tensors) || !can_reduce(tensors, options.reduceOp))
    return gloo()->reduce(tensors, options);
  auto work = begin(c10d::OpType::REDUCE, "apex:reduce", options.timeout, tensors, tensors);
  const at::Tensor& tensor = only(tensors, work->what());
  const at::Tensor mine = is_root(options.rootRank, work->what())
                              ? work->output(tensor, /*with_elements=*/true)
                              : in_order(tensor);
  work->add(channel()->reduce(work->what(), mine, options.reduceOp, options.rootRank));
  return work;
}

/// Gathers each input from all ranks into the list of outputs of the same index.
WorkPtr HostBackend::all_gather_each(c10d::OpType type, const char* title,
                                     const c10d::AllgatherOptions& options,
                                     const std::vector<Tensors>& outputs, const Tensors& inputs) {
  require_pairs(outputs.size(), inputs.size(), title);
  auto work = begin(type, title, options.timeout, inputs, concat(outputs));
  for (size_t i = 0; i < inputs.size(); ++i) {
    work->add(channel()->all_gather(work->what(), work->outputs(outputs[i]), in_order(inputs[i])));
  }
  return work;
}

WorkPtr HostBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& options) {
  if (!in_memory(inputs)) return gloo()->allgather(outputs, inputs, options);
  only_list(outputs, size_, "apex:all_gather");
  return all_gather_each(c10d::OpType::ALLGATHER, "apex:all_gather", options, outputs, inputs);
}

WorkPtr HostBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& options) {
  if (!in_memory({output, input})) return gloo()->_allgather_base(output, input, options);
  return all_gather_each(c10d::OpType::_ALLGATHER_BASE, "apex:_all_gather_base", options,
                         {{output}}, {input});
}

WorkPtr HostBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) {
  constexpr const char* kTitle = "apex:all_gather";
  if (!in_memory(inputs)) return gloo()->allgather_coalesced(outputs, inputs, options);
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), kTitle, ": ", outputs.size(),
                    " lists of tensors for ", size_, " ranks");
  std::vector<Tensors> of_input(inputs.size());
  for (const Tensors& of_rank : outputs) {
    require_pairs(of_rank.size(), inputs.size(), kTitle);
    for (size_t i = 0; i < inputs.size(); ++i) of_input[i].push_back(of_rank[i]);
  }
  return all_gather_each(c10d::OpType::ALLGATHER_COALESCED, kTitle, options, of_input, inputs);
}

WorkPtr HostBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  if (!in_memory(outputs) || !in_memory(inputs))
    return gloo()->allgather_into_tensor_coalesced(outputs, inputs, options);
  return all_gather_each(c10d::OpType::COALESCED, "apex:all_gather_into_tensor", options,
                         each(outputs, alone), inputs);
}

WorkPtr HostBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::GatherOptions& options) {
  if (!in_memory(inputs)) return gloo()->gather(outputs, inputs, options);
  const Tensors list = list_of_root(outputs, options.rootRank, "apex:gather");
  auto work = begin(c10d::OpType::GATHER, "apex:gather", options.timeout, inputs, list);
  work->add(channel()->gather(work->what(), work->outputs(list),
                              in_order(only(inputs, work->what())), options.rootRank));
  return work;
}

WorkPtr HostBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ScatterOptions& options) {
  if (!in_memory(outputs)) return gloo()->scatter(outputs, inputs, options);
  const Tensors list = list_of_root(inputs, options.rootRank, "apex:scatter");
  auto work = begin(c10d::OpType::SCATTER, "apex:scatter", options.timeout, outputs, outputs);
  work->add(channel()->scatter(work->what(), work->output(only(outputs, work->what())),
                               each(list, in_order), options.rootRank));
  return work;
}

/// Reduce-scatters each list of inputs into the output of the same index.
WorkPtr HostBackend::reduce_scatter_each(c10d::OpType type, const char* title,
                                         const c10d::ReduceScatterOptions& options,
                                         const Tensors& outputs,
                                         const std::vector<Tensors>& inputs) {
  require_pairs(outputs.size(), inputs.size(), title);
  auto work = begin(type, title, options.timeout, concat(inputs), outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    work->add(channel()->reduce_scatter(work->what(), work->output(outputs[i]),
                                        each(inputs[i], in_order), options.reduceOp));
  }
  return work;
}

WorkPtr HostBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  if (!in_memory(outputs) || !can_reduce(outputs, options.reduceOp))
    return gloo()->reduce_scatter(outputs, inputs, options);
  const Tensors& list = only_list(inputs, size_, "apex:reduce_scatter");
  const bool even = std::all_of(list.begin(), list.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == list.front().numel();
  });
  if (!even) return gloo()->reduce_scatter(outputs, inputs, options);
  return reduce_scatter_each(c10d::OpType::REDUCE_SCATTER, "apex:reduce_scatter", options, outputs,
                             inputs);
}

WorkPtr HostBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  if (!in_memory({output, input}) || !can_reduce({output}, options.reduceOp))
    return gloo()->_reduce_scatter_base(output, input, options);
  return reduce_scatter_each(c10d::OpType::_REDUCE_SCATTER_BASE, "apex:_reduce_scatter_base",
                             options, {output}, {{input}});
}

WorkPtr HostBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  if (!in_memory(outputs) || !in_memory(inputs) || !can_reduce(outputs, options.reduceOp))
    return gloo()->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  return reduce_scatter_each(c10d::OpType::COALESCED, "apex:reduce_scatter_tensor", options,
                             outputs, each(inputs, alone));
}

WorkPtr HostBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_sizes,
                                   std::vector<int64_t>& input_sizes,
                                   const c10d::AllToAllOptions& options) {
  if (!in_memory({output, input}))
    return gloo()->alltoall_base(output, input, output_sizes, input_sizes, options);
  require_split(output, output_sizes, size_);
  require_split(input, input_sizes, size_);
  auto work = begin(c10d::OpType::ALLTOALL_BASE, kAllToAll, options.timeout, {input}, {output});
  work->add(channel()->all_to_all(work->what(), work->output(output), in_order(input), output_sizes,
                                  input_sizes));
  return work;
}

WorkPtr HostBackend::alltoall(Tensors& outputs, Tensors& inputs,
                              const c10d::AllToAllOptions& options) {
  if (!in_memory(outputs) || !in_memory(inputs)) return gloo()->alltoall(outputs, inputs, options);
  const auto ranks = static_cast<size_t>(size_);
  TORCH_CHECK_VALUE(outputs.size() == ranks && inputs.size() == ranks, kAllToAll, ": lists of ",
                    outputs.size(), " and ", inputs.size(), " tensors for ", size_, " ranks");
  auto work = begin(c10d::OpType::ALLTOALL, kAllToAll, options.timeout, inputs, outputs);
  const at::AutoDispatchBelowADInplaceOrView guard;
  const std::vector<int64_t> received = each(outputs, numel);
  const at::Tensor all = at::empty({sum_of(received)}, outputs.front().options());
  work->split_later(all, outputs);
  work->add(channel()->all_to_all(work->what(), all, at::cat(each(inputs, flat)), received,
                                  each(inputs, numel)));
  return work;
}

c10::intrusive_ptr<HostBackend> make_host_backend(const distributed::BackendRequest& request) {
  auto gloo = distributed::make_gloo_backend(request);
  HostLinks links = connect_host(*gloo, gloo, request.store, request.timeout);
  return c10::make_intrusive<HostBackend>(request, std::move(gloo), std::move(links));
}

}  // namespace apex::parallel

namespace apex::distributed {

using std::chrono::milliseconds;

void add_host_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group, milliseconds timeout,
                      const std::string& name, const std::vector<uint64_t>& global_ranks) {
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
  request.timeout = std::min<milliseconds>(timeout, kLongestTimeout);
  request.group_name = name;
  request.global_ranks = global_ranks;
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = parallel::make_host_backend(request);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommunicationError("rank " + std::to_string(request.rank) + " of " +
                             std::to_string(request.size) +
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
