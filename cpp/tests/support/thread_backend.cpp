// SPDX-License-Identifier: BSD-3-Clause
#include <support/thread_backend.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <mutex>
#include <optional>
#include <thread>

namespace apex::testing {
namespace {

using Pieces = std::vector<std::vector<at::Tensor>>;

Pieces one_each(const std::vector<at::Tensor>& tensors) {
  Pieces pieces;
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back({tensor});
  }
  return pieces;
}

// Splits a tensor into one equal part per rank, in rank order.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor, int world) {
  at::AutoDispatchBelowADInplaceOrView guard;
  TORCH_CHECK(tensor.is_contiguous() && tensor.numel() % world == 0,
              "a tensor of all ranks must be contiguous and divisible by the world size");
  const auto flat = tensor.view(-1);
  const int64_t length = tensor.numel() / world;
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < world; ++rank) {
    parts.push_back(flat.narrow(0, rank * length, length));
  }
  return parts;
}

// The same with `lengths` rows per rank; empty means equal parts.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor, int world,
                                 const std::vector<int64_t>& lengths) {
  if (lengths.empty()) return parts_of(tensor, world);
  at::AutoDispatchBelowADInplaceOrView guard;
  TORCH_CHECK(lengths.size() == static_cast<size_t>(world), "one length per rank is needed");
  return tensor.split_with_sizes(lengths);
}

void check_parts(const Pieces& parts, const std::vector<at::Tensor>& wholes, int world) {
  TORCH_CHECK(parts.size() == wholes.size(), "as many lists as tensors are needed");
  for (size_t i = 0; i < parts.size(); ++i) {
    TORCH_CHECK(parts[i].size() == static_cast<size_t>(world), "one tensor per rank is needed");
    for (const at::Tensor& part : parts[i]) {
      TORCH_CHECK(
          part.numel() == wholes[i].numel() && part.scalar_type() == wholes[i].scalar_type(),
          "all parts must have the size and dtype of the rank's own tensor");
    }
  }
}

std::vector<at::Tensor> flatten(const Pieces& pieces) {
  std::vector<at::Tensor> all;
  for (const auto& list : pieces) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& exception) {
    return exception.what_without_backtrace();
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

// MKL looks up the kernel of a vector function in that function's first call. If two threads make
// this call concurrently, one of them may get a low-accuracy kernel for it (oneMKL before 2025.0,
// which torch's wheels contain; pytorch/pytorch#188792). A rank's activations are then off by 1e-4,
// once. So one thread calls these functions before ranks start.
void settle_vector_functions() {
  using Function = at::Tensor (*)(const at::Tensor&);
  static const bool settled = [] {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor x = at::full({64}, 0.5, dtype);
      for (const Function function :
           {Function{at::tanh}, Function{at::sqrt}, Function{at::exp}, Function{at::log},
            Function{at::sin}, Function{at::cos}, Function{at::erf}}) {
        function(x);
      }
    }
    return true;
  }();
  static_cast<void>(settled);
}

}  // namespace

ThreadBackend::ThreadBackend(int rank, std::shared_ptr<ThreadBackendControl> control)
    : c10d::Backend(rank, control->world_size()),
      control_(std::move(control)),
      timeout_ms_(control_->timeout().count()) {}

void ThreadBackend::setTimeout(std::chrono::milliseconds timeout) { timeout_ms_ = timeout.count(); }

at::Tensor ThreadBackend::allocateTensor(long size, at::TensorOptions options) {
  return control_->allocate(size, options);
}

uint64_t ThreadBackend::getSequenceNumberForGroup() { return control_->issued(rank_); }

c10::intrusive_ptr<c10d::Work> ThreadBackend::issue(const char* op, c10d::OpType type,
                                                    Contribution contribution,
                                                    std::chrono::milliseconds timeout) {
  contribution.record.op = op;
  auto results = flatten(contribution.outputs);
  const bool unset = timeout == c10d::kUnsetTimeout || timeout == kNoTimeout;
  return control_->issue(rank_, type, std::move(contribution), std::move(results),
                         unset ? std::chrono::milliseconds(timeout_ms_.load()) : timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                        const c10d::BroadcastOptions& options) {
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < size_, "broadcast: there is no rank ",
              options.rootRank);
  Contribution contribution;
  contribution.record.root = options.rootRank;
  contribution.inputs = contribution.outputs = one_each(tensors);
  return issue("broadcast", c10d::OpType::BROADCAST, std::move(contribution), options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::AllreduceOptions& options) {
  Contribution contribution;
  contribution.record.reduce_op = options.reduceOp;
  contribution.record.async_op = options.asyncOp;
  contribution.inputs = contribution.outputs = one_each(tensors);
  return issue("allreduce", c10d::OpType::ALLREDUCE, std::move(contribution), options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  Contribution contribution;
  contribution.record.reduce_op = options.reduceOp;
  contribution.inputs = contribution.outputs = one_each(tensors);
  return issue("allreduce_coalesced", c10d::OpType::ALLREDUCE_COALESCED, std::move(contribution),
               options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::reduce(std::vector<at::Tensor>& tensors,
                                                     const c10d::ReduceOptions& options) {
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < size_, "reduce: there is no rank ",
              options.rootRank);
  Contribution contribution;
  contribution.record.reduce_op = options.reduceOp;
  contribution.record.root = options.rootRank;
  contribution.inputs = contribution.outputs = one_each(tensors);
  return issue("reduce", c10d::OpType::REDUCE, std::move(contribution), options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  check_parts(outputs, inputs, size_);
  Contribution contribution;
  contribution.inputs = one_each(inputs);
  contribution.outputs = outputs;
  return issue("allgather", c10d::OpType::ALLGATHER, std::move(contribution), options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Contribution contribution;
  contribution.record.async_op = options.asyncOp;
  contribution.inputs = {{input}};
  contribution.outputs = {parts_of(output, size_)};
  check_parts(contribution.outputs, {input}, size_);
  return issue("_allgather_base", c10d::OpType::_ALLGATHER_BASE, std::move(contribution),
               options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  Contribution contribution;
  contribution.inputs = one_each(inputs);
  for (const at::Tensor& output : outputs) {
    contribution.outputs.push_back(parts_of(output, size_));
  }
  check_parts(contribution.outputs, inputs, size_);
  return issue("allgather_into_tensor_coalesced", c10d::OpType::COALESCED, std::move(contribution),
               options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& options) {
  check_parts(inputs, outputs, size_);
  Contribution contribution;
  contribution.record.reduce_op = options.reduceOp;
  contribution.inputs = inputs;
  contribution.outputs = one_each(outputs);
  return issue("reduce_scatter", c10d::OpType::REDUCE_SCATTER, std::move(contribution),
               options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Contribution contribution;
  contribution.record.reduce_op = options.reduceOp;
  contribution.inputs = {parts_of(input, size_)};
  contribution.outputs = {{output}};
  check_parts(contribution.inputs, {output}, size_);
  return issue("_reduce_scatter_base", c10d::OpType::_REDUCE_SCATTER_BASE, std::move(contribution),
               options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                            std::vector<int64_t>& output_lengths,
                                                            std::vector<int64_t>& input_lengths,
                                                            const c10d::AllToAllOptions& options) {
  Contribution contribution;
  contribution.inputs = {parts_of(input, size_, input_lengths)};
  contribution.outputs = {parts_of(output, size_, output_lengths)};
  return issue("alltoall_base", c10d::OpType::ALLTOALL_BASE, std::move(contribution),
               options.timeout);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::barrier(const c10d::BarrierOptions& options) {
  return issue("barrier", c10d::OpType::BARRIER, {}, options.timeout);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_thread_group(
    int rank, const std::shared_ptr<ThreadBackendControl>& control) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), rank,
                                                       control->world_size());
  const c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<ThreadBackend>(rank, control);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

ScopedGroupName::ScopedGroupName(std::string name,
                                 const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : name_(std::move(name)) {
  c10d::register_process_group(name_, group);
}

ScopedGroupName::~ScopedGroupName() { c10d::unregister_process_group(name_); }

RankError::RankError(int rank, const std::string& message, std::exception_ptr cause)
    : std::runtime_error("rank " + std::to_string(rank) + ": " + message),
      rank_(rank),
      cause_(std::move(cause)) {}

void run_ranks(int world_size, const RankFunction& body) {
  run_ranks(ThreadBackendControl::create(world_size), body);
}

void run_ranks(const std::shared_ptr<ThreadBackendControl>& control, const RankFunction& body,
               const std::string& group_name) {
  settle_vector_functions();
  at::detail::getDefaultCPUGenerator();  // created in the first call, before threads
  std::mutex mutex;
  std::optional<RankError> first;
  // c10d's registry of group names is per process; this mode makes it per thread.
  c10d::set_thread_isolation_mode(true);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < control->world_size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto group = make_thread_group(rank, control);
        std::optional<ScopedGroupName> name;
        if (!group_name.empty()) {
          name.emplace(group_name, group);
        }
        body(rank, group);
      } catch (...) {
        const auto error = std::current_exception();
        const RankError described(rank, message_of(error), error);
        {
          std::lock_guard<std::mutex> lock(mutex);
          if (!first) {
            first = described;
          }
        }
        control->abort(described.what());
      }
      control->leave(rank);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  c10d::set_thread_isolation_mode(false);
  if (first) {
    throw *first;
  }
}

}  // namespace apex::testing
