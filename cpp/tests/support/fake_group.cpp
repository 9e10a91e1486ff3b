// SPDX-License-Identifier: BSD-3-Clause
#include <support/fake_group.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <support/fake_device.h>

namespace apex::testing::fake {
namespace {

using Tensors = std::vector<at::Tensor>;

class MirrorWork final : public c10d::Work {
 public:
  MirrorWork(c10d::OpType type, c10::Stream stream, Tensors kept, const Tensors& outputs)
      : c10d::Work(0, type), stream_(stream), done_(record(stream)), kept_(std::move(kept)) {
    const c10::StreamGuard guard(stream_);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device()});
    future_->markCompleted(c10::IValue(outputs));
  }

  ~MirrorWork() override {
    // Without wait(), the backend keeps the tensors until the work is complete on the device.
    for (const at::Tensor& tensor : kept_) used_on(tensor, stream_);
  }

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    fake::wait(current_stream(), done_);
    kept_.clear();
    return true;
  }
  void synchronize() override { wait(); }
  bool isCompleted() override { return query(done_); }
  bool isSuccess() const override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const c10::Stream stream_;
  const Mark done_;
  Tensors kept_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class MirrorBackend final : public c10d::Backend {
 public:
  MirrorBackend(int world_size, const std::string& name, const MirrorRules& rules)
      : c10d::Backend(0, world_size), stream_(new_stream(name)), rules_(rules) {}

  const std::string getBackendName() const override { return rules_.backend_name; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const bool sums = options.reduceOp == c10d::ReduceOp::SUM;
    const bool as_nccl =
        options.reduceOp == c10d::ReduceOp::AVG && rules_.backend_name.compare(0, 4, "nccl") == 0;
    return issue("all-reduce", c10d::OpType::ALLREDUCE, tensors, tensors,
                 [tensors, sums, as_nccl, size = size_] {
                   for (const at::Tensor& tensor : tensors) {
                     const at::Tensor values = host_alias(tensor);
                     if (as_nccl) values.mul_(at::full({1}, 1.0 / size, values.options()));
                     if (sums || as_nccl) values.mul_(size);
                   }
                 });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const at::Tensor mine = tensors.at(0);
    return issue("broadcast", c10d::OpType::BROADCAST, tensors, tensors,
                 [this, mine, sends = options.rootRank == 0] {
                   const at::Tensor bytes = host_alias(mine).view({-1}).view(at::kByte);
                   if (sends) sent_ = bytes.clone();
                   if (!sends && sent_.defined() && sent_.sizes() == bytes.sizes())
                     bytes.copy_(sent_);
                 });
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions&) override {
    return issue("all-gather", c10d::OpType::ALLGATHER, inputs, outputs.at(0),
                 [input = inputs.at(0), all = outputs.at(0)] {
                   for (const at::Tensor& output : all) host_alias(output).copy_(host_alias(input));
                 });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    return issue("all-gather", c10d::OpType::_ALLGATHER_BASE, {input}, {output},
                 [input, output, size = size_] {
                   host_alias(output).view({size, -1}).copy_(host_alias(input).view({1, -1}));
                 });
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>&, std::vector<int64_t>&,
                                               const c10d::AllToAllOptions&) override {
    // Every other rank sends a copy of this rank's message to itself.
    return issue("all-to-all", c10d::OpType::ALLTOALL_BASE, {input}, {output},
                 [input, output, size = size_] {
                   host_alias(output)
                       .view({size, -1})
                       .copy_(host_alias(input).view({size, -1}).narrow(0, 0, 1));
                 });
  }

 private:
  c10::intrusive_ptr<c10d::Work> issue(const std::string& what, c10d::OpType type,
                                       const Tensors& inputs, const Tensors& outputs,
                                       const std::function<void()>& compute) {
    order(current_stream(), stream_);
    operate(stream_, what, inputs, outputs, compute);
    Tensors kept = inputs;
    kept.insert(kept.end(), outputs.begin(), outputs.end());
    if (rules_.holds_what_it_had) held_.insert(held_.end(), kept.begin(), kept.end());
    if (rules_.issued) rules_.issued->push_back(what);
    return c10::make_intrusive<MirrorWork>(type, stream_, std::move(kept), outputs);
  }

  const c10::Stream stream_;
  const MirrorRules rules_;
  Tensors held_;
  at::Tensor sent_;  ///< by this rank's last broadcast
};

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> make_mirror_group(int world_size, const std::string& name,
                                                         const MirrorRules& rules) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0,
                                                       world_size);
  const c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<MirrorBackend>(world_size, name, rules);
  group->setBackend(c10::DeviceType::PrivateUse1, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

}  // namespace apex::testing::fake
