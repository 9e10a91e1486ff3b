// SPDX-License-Identifier: BSD-3-Clause
#include <support/thread_backend.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace apex::testing {
namespace {

// One part for each rank, in rank order: of `lengths` rows, or equal ones if that is empty.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor, int world,
                                 const std::vector<int64_t>& lengths = {}) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (!lengths.empty()) return tensor.split_with_sizes(lengths);
  TORCH_CHECK(tensor.is_contiguous() && tensor.numel() % world == 0,
              "a tensor of all ranks must be contiguous and divisible by the world size");
  return tensor.view(-1).tensor_split(world);
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
    : c10d::Backend(rank, control->world_size()), control_(std::move(control)) {}

c10::intrusive_ptr<c10d::Work> ThreadBackend::issue(const char* op, c10d::OpType type,
                                                    std::vector<at::Tensor> inputs,
                                                    std::vector<at::Tensor> outputs,
                                                    CollectiveRecord record) {
  record.op = op;
  return control_->issue(rank_, type,
                         {std::move(record), std::move(inputs), std::move(outputs), {}});
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                        const c10d::BroadcastOptions& options) {
  CollectiveRecord record;
  record.root = options.rootRank;
  return issue("broadcast", c10d::OpType::BROADCAST, tensors, tensors, std::move(record));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::AllreduceOptions& options) {
  CollectiveRecord record;
  record.reduce_op = options.reduceOp;
  record.async_op = options.asyncOp;
  return issue("allreduce", c10d::OpType::ALLREDUCE, tensors, tensors, std::move(record));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions&) {
  return issue("allgather", c10d::OpType::ALLGATHER, inputs, outputs.at(0));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  CollectiveRecord record;
  record.async_op = options.asyncOp;
  return issue("_allgather_base", c10d::OpType::_ALLGATHER_BASE, {input}, parts_of(output, size_),
               std::move(record));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                            std::vector<int64_t>& output_lengths,
                                                            std::vector<int64_t>& input_lengths,
                                                            const c10d::AllToAllOptions&) {
  return issue("alltoall_base", c10d::OpType::ALLTOALL_BASE, parts_of(input, size_, input_lengths),
               parts_of(output, size_, output_lengths));
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

void run_ranks(int world_size, const RankFunction& body) {
  run_ranks(ThreadBackendControl::create(world_size), body);
}

void run_ranks(const std::shared_ptr<ThreadBackendControl>& control, const RankFunction& body,
               const std::string& group_name) {
  settle_vector_functions();
  at::detail::getDefaultCPUGenerator();  // created in the first call, before threads
  std::mutex mutex;
  std::optional<std::string> first;
  // c10d's registry of group names is per process; this mode makes it per thread.
  c10d::set_thread_isolation_mode(true);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < control->world_size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto group = make_thread_group(rank, control);
        if (!group_name.empty()) c10d::register_process_group(group_name, group);
        body(rank, group);
      } catch (...) {
        const std::string error =
            "rank " + std::to_string(rank) + ": " + message_of(std::current_exception());
        {
          const std::lock_guard<std::mutex> lock(mutex);
          if (!first) first = error;
        }
        control->abort(error);
      }
      if (!group_name.empty()) c10d::unregister_process_group(group_name);
      control->leave(rank);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  c10d::set_thread_isolation_mode(false);
  if (first) throw std::runtime_error(*first);
}

}  // namespace apex::testing
