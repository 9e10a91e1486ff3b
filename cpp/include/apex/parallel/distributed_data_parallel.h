// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <apex/distributed/process_group.h>
#include <apex/error.h>
#include <apex/parallel/model_sync.h>
#include <apex/parallel/output_tensors.h>
#include <apex/parallel/reducer.h>
#include <apex/parallel/sync_batch_norm.h>

/// Data-parallel training of torch::nn modules.
///
///     auto group = apex::distributed::init_process_group("gloo");
///     apex::parallel::DistributedDataParallel model{Net()};  // in braces: in parentheses it
///     declares a function
///     ...
///     loss_of(model.forward(x)).backward();  // gradients are averaged over the ranks
///     optimizer.step();

namespace apex::parallel {

/// Everything that can be chosen: the reducer's options and these.
struct DistributedDataParallelOptions : ReducerOptions {
  /// The ranks that take part; by default those of apex::distributed::init_process_group().
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;

  /// Take rank 0's buffers (running statistics of batch norm, for one) at construction and before
  /// each training forward.
  bool broadcast_buffers = false;
};

/// Wraps a module so that backward averages its gradients over the ranks of a process group while
/// it is still running; see Reducer for what happens when.
///
/// `Wrapped` is a module holder (`TORCH_MODULE(Net)`'s `Net`) or a `std::shared_ptr` to a module.
/// The wrapper is not a module: parameters keep their names, and `torch::save(model.module(),
/// path)` writes what the unwrapped module would, from any rank.
///
/// Construction is collective and blocks the host; forward() is collective only where it
/// synchronizes buffers. Not thread safe.
template <typename Wrapped>
class DistributedDataParallel {
 public:
  /// Verifies that all ranks hold the same model and takes rank 0's parameters, frozen ones
  /// included.
  /// @throws InvalidArgument, RankMismatch, CommunicationError as Reducer does; InvalidArgument if
  ///         there is no process group.
  explicit DistributedDataParallel(Wrapped module, DistributedDataParallelOptions options = {})
      : module_(required(std::move(module))),
        group_(options.process_group ? options.process_group
                                     : apex::distributed::get_default_group()),
        broadcast_buffers_(options.broadcast_buffers),
        buffers_(broadcast_buffers_ ? describe_buffers() : std::vector<std::string>()),
        reducer_(make_reducer(options)) {
    name_layers(*module_);
    if (options.init_sync && broadcast_buffers_) synchronize_buffers(0);
  }

  /// Calls the module's forward and returns what it returns.
  template <typename... Args>
  auto forward(Args&&... args) {
    const bool training = at::GradMode::is_enabled();
    if (training) {
      reducer_->prepare_for_forward(module_->is_training());
      const bool buffers =
          broadcast_buffers_ && module_->is_training() && reducer_->synchronizing();
      int64_t root = 0;
      if (joining_) root = reducer_->announce(JoinEvent::kForward, buffers).active.front();
      if (buffers) synchronize_buffers(root);
    }
    if constexpr (std::is_void_v<decltype(module_->forward(std::forward<Args>(args)...))>) {
      module_->forward(std::forward<Args>(args)...);
    } else {
      auto output = module_->forward(std::forward<Args>(args)...);
      if (training) reducer_->watch_outputs(output_tensors(output));
      return output;
    }
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// While it lives, backward does not communicate and gradients accumulate; what accumulated is
  /// part of the next synchronized backward. Guards may be nested. Every rank has to do the same.
  class NoSync {
   public:
    explicit NoSync(Reducer& reducer) : reducer_(reducer), before_(reducer.synchronizing()) {
      reducer_.set_synchronizing(false);
    }
    ~NoSync() { reducer_.set_synchronizing(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    Reducer& reducer_;
    const bool before_;
  };

  [[nodiscard]] NoSync no_sync() { return NoSync(*reducer_); }

  /// For ranks with different numbers of batches: call begin_join() before the loop over them and
  /// end_join() after it, on every rank. A rank that ends early takes part in the others' backwards
  /// with zeros, and at the end has the parameters and buffers of one that went to the end. See
  /// Reducer::begin_join(). Modules with collectives of their own, as SyncBatchNorm, are not
  /// covered.
  void begin_join(bool divide_by_initial_world_size = true) {
    reducer_->begin_join(divide_by_initial_world_size);
    joining_ = true;
  }
  /// Blocks until every rank has called it.
  void end_join() {
    joining_ = false;
    const int64_t root = reducer_->follow_until_end([this](const JoinEvent& event) {
      if (event.argument != 0) synchronize_buffers(event.active.front());
    });
    if (root < 0) return;
    broadcast_coalesced(module_->parameters(), group_, root);
    broadcast_coalesced(module_->buffers(), group_, root);
    // Nobody goes on, and perhaps ends, before all have what was sent.
    const std::vector<at::Tensor> parameters = module_->parameters();
    if (parameters.empty()) return;
    all_reduce_coalesced({at::zeros({1}, parameters.front().device())}, group_, 1.0,
                         "end of join()");
  }

  /// The wrapped module: `model->fc1`, `torch::save(model.module(), path)`.
  Wrapped& module() { return module_; }
  const Wrapped& module() const { return module_; }
  auto* operator->() { return &*module_; }
  const auto* operator->() const { return &*module_; }

  std::vector<at::Tensor> parameters() const { return module_->parameters(); }
  void zero_grad(bool set_to_none = true) { module_->zero_grad(set_to_none); }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }

  /// The engine, for its counters, communication hooks and plan.
  Reducer& reducer() { return *reducer_; }

  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const { return group_; }

 private:
  static Wrapped required(Wrapped module) {
    bool empty = false;
    if constexpr (std::is_constructible_v<bool, const Wrapped&>) {
      empty = !static_cast<bool>(module);
    }
    if (empty) {
      throw InvalidArgument(
          "DistributedDataParallel: the module is null; construct it first, e.g. Net(), "
          "std::make_shared<NetImpl>()");
    }
    return module;
  }

  std::unique_ptr<Reducer> make_reducer(ReducerOptions options) const {
    std::vector<NamedTensor> named;
    for (const auto& item : module_->named_parameters())
      named.push_back({item.key(), item.value()});
    if (broadcast_buffers_) {
      // Compared between ranks, since buffers travel in one message. Not as in Python, whose
      // messages have a header.
      options.settings.push_back("broadcast_buffers=C++");
      options.settings.insert(options.settings.end(), buffers_.begin(), buffers_.end());
    }
    return std::make_unique<Reducer>(std::move(named), std::vector{group_}, std::move(options));
  }

  std::vector<std::string> describe_buffers() const {
    std::vector<std::string> lines;
    for (const auto& item : module_->named_buffers()) {
      std::string line =
          "buffer '" + item.key() + "'=" + c10::toString(item.value().scalar_type()) + " [";
      for (const int64_t size : item.value().sizes()) line += " " + std::to_string(size);
      lines.push_back(line + " ]");
    }
    return lines;
  }

  void synchronize_buffers(int64_t root) {
    if (describe_buffers() != buffers_) {
      throw Error("rank " + std::to_string(group_->getRank()) +
                  ": a buffer was added, removed, or has another shape or dtype than when the "
                  "ranks compared theirs, "
                  "so broadcast_buffers would mix up their values: make such changes on every "
                  "rank, and construct the "
                  "wrapper again");
    }
    std::vector<at::Tensor> buffers;
    for (const auto& item : module_->named_buffers()) {
      // Written without counting as a change of what an earlier forward saved, as batch norm's own
      // update of them is: its backward in training reads the statistics of the batch.
      const bool running =
          ends_with(item.key(), "running_mean") || ends_with(item.key(), "running_var");
      buffers.push_back(running ? item.value().variable_data() : item.value());
    }
    broadcast_coalesced(buffers, group_, root);
  }

  static bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() &&
           text.compare(text.size() - end.size(), end.size(), end) == 0;
  }

  Wrapped module_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool broadcast_buffers_;
  std::vector<std::string> buffers_;  ///< as the ranks have compared them
  bool joining_ = false;
  std::unique_ptr<Reducer> reducer_;
};

}  // namespace apex::parallel
