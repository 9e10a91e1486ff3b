// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/detail/wrapper.h>

#include <algorithm>
#include <string_view>

#include <apex/error.h>
#include <apex/parallel/detail/model_sync.h>
#include <apex/parallel/sync_batch_norm.h>

#include "batch_norm/sync_batch_norm_ops.h"

namespace apex::parallel::detail {
namespace {

/// The addresses of a module's own parameters. Module::parameters() copies the names, which took 45
/// us in every forward for 400 parameters; this takes 1 us.
struct OwnParameters : torch::nn::Module {
  static void add_addresses(const torch::nn::Module& module, std::vector<const void*>& addresses) {
    for (const auto& item : module.*(&OwnParameters::parameters_))
      addresses.push_back(item.value().unsafeGetTensorImpl());
  }
};

bool is_running_statistic(std::string_view name) {
  for (const std::string_view end : {"running_mean", "running_var"}) {
    if (name.size() >= end.size() && name.substr(name.size() - end.size()) == end) return true;
  }
  return false;
}

}  // namespace

Wrapper::Wrapper(torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                 bool broadcast_buffers, ReducerOptions options)
    : module_(module),
      group_(std::move(group)),
      broadcast_buffers_(broadcast_buffers),
      buffers_(broadcast_buffers ? describe_buffers() : std::vector<std::string>()) {
  if (broadcast_buffers_) {
    // Compared between ranks, since all buffers travel in one message. Python's messages have a
    // header and differ, so its setting has another value.
    options.settings.push_back("broadcast_buffers=C++");
    options.settings.insert(options.settings.end(), buffers_.begin(), buffers_.end());
  }
  const bool init_sync = options.init_sync;
  reducer_ = std::make_unique<Reducer>(named_tensors(module_.named_parameters()),
                                       std::vector{group_}, std::move(options));
  parameters_ = identities();
  name_layers(module_);
  if (!broadcast_buffers_) return;
  require_sendable(named_tensors(module_.named_buffers()), "buffer", group_);
  if (init_sync) synchronize_buffers();
}

/// The reducer keeps its parameters alive, so no other tensor can have the address of one of them.
std::vector<const void*> Wrapper::identities() const {
  std::vector<const void*> found;
  found.reserve(parameters_.size());
  const torch::nn::Module& module = module_;
  module.apply([&](const torch::nn::Module& one) { OwnParameters::add_addresses(one, found); });
  return found;
}

void Wrapper::refuse_other_parameters() const {
  std::string name;
  for (const auto& item : module_.named_parameters()) {
    const void* const one = item.value().unsafeGetTensorImpl();
    if (name.empty() && std::find(parameters_.begin(), parameters_.end(), one) == parameters_.end())
      name = item.key();
  }
  throw Error("rank " + std::to_string(group_->getRank()) + ": " +
              (name.empty() ? "a parameter was removed"
                            : "parameter '" + name + "' was added or replaced") +
              " after the DistributedDataParallel was constructed, so its gradient would not be "
              "averaged: make such changes on every rank, and construct the wrapper again");
}

void Wrapper::before_forward() {
  if (identities() != parameters_) refuse_other_parameters();
  reducer_->prepare_for_forward();
  // Under join() some ranks may run no forward.
  if (broadcast_buffers_ && module_.is_training() && reducer_->synchronizing() && !joining_)
    synchronize_buffers();
}

void Wrapper::stop_synchronizing() {
  if (no_sync_++ > 0) return;
  synchronizing_before_ = reducer_->synchronizing();
  reducer_->set_synchronizing(false);
}

void Wrapper::continue_synchronizing() {
  if (--no_sync_ == 0) reducer_->set_synchronizing(synchronizing_before_);
}

void Wrapper::begin_join(bool divide_by_initial_world_size, bool throw_on_early_termination) {
  module_.apply([](torch::nn::Module& one) {
    if (one.as<SyncBatchNormImpl>() == nullptr) return;
    throw Error(
        "DistributedDataParallel.join() with SyncBatchNorm is not supported: use BatchNorm, or the "
        "same number of batches on every rank");
  });
  reducer_->begin_join(divide_by_initial_world_size, throw_on_early_termination);
  joining_ = true;
}

void Wrapper::end_join() {
  joining_ = false;
  // Python's join() passes the same list. Its ranks may be in this job.
  std::vector<at::Tensor> tensors = module_.parameters();
  for (const at::Tensor& buffer : module_.buffers()) {
    if (buffer.layout() == at::kStrided) tensors.push_back(buffer);
  }
  reducer_->end_join(tensors);
}

void Wrapper::leave_join() noexcept {
  joining_ = false;
  reducer_->leave_join();
}

std::vector<std::string> Wrapper::describe_buffers() const {
  std::vector<std::string> lines;
  for (const auto& item : module_.named_buffers()) {
    std::string line =
        "buffer '" + item.key() + "'=" + c10::toString(item.value().scalar_type()) + " [";
    for (const int64_t size : item.value().sizes()) line += " " + std::to_string(size);
    // For buffers that cannot be sent, every rank throws, or no rank does.
    line += item.value().is_meta() ? " ] on meta" : " ]";
    if (item.value().layout() != at::kStrided) line += " not strided";
    lines.push_back(std::move(line));
  }
  return lines;
}

void Wrapper::synchronize_buffers() {
  if (describe_buffers() != buffers_) {
    throw Error("rank " + std::to_string(group_->getRank()) +
                ": a buffer was added, removed, or changed its shape or dtype since the ranks "
                "compared their buffers, so broadcast_buffers would mix up values: make such "
                "changes on every rank, and construct the wrapper again");
  }
  std::vector<at::Tensor> buffers;
  for (const auto& item : module_.named_buffers()) {
    // variable_data(): the write does not bump the version of tensors that an earlier forward
    // saved. Batch norm's own update does not either, because its backward in training reads the
    // batch statistics.
    buffers.push_back(is_running_statistic(item.key()) ? item.value().variable_data()
                                                       : item.value());
  }
  broadcast_coalesced(buffers, group_);
}

}  // namespace apex::parallel::detail
