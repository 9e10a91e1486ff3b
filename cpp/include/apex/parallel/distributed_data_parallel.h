// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/serialize/archive.h>

#include <apex/distributed.h>
#include <apex/error.h>
#include <apex/parallel/detail/output_tensors.h>
#include <apex/parallel/detail/wrapper.h>
#include <apex/parallel/reducer.h>

/// Data-parallel training of torch::nn modules.
///
///     apex::distributed::init_process_group("gloo");
///     apex::parallel::DistributedDataParallel model{Net()};  // braces: () declares a function
///     torch::optim::SGD optimizer(model.parameters(), 0.1);
///     for (const auto& [x, y] : batches) {
///       optimizer.zero_grad();
///       loss_of(model.forward(x), y).backward();  // gradients are averaged over the ranks
///       optimizer.step();
///     }

namespace apex::parallel {

/// Options of DistributedDataParallel, set like options of torch::nn:
///
///     apex::parallel::DistributedDataParallel model(
///         Net(), apex::parallel::DistributedDataParallelOptions().gradient_as_bucket_view(true));
///
/// A process group alone converts to options. The wrapper refuses options that contradict each
/// other.
class DistributedDataParallelOptions {
 public:
  DistributedDataParallelOptions() = default;
  /* implicit */ DistributedDataParallelOptions(
      c10::intrusive_ptr<c10d::ProcessGroup> process_group)
      : process_group_(std::move(process_group)) {}

  /// The ranks that take part; default: all ranks of apex::distributed::init_process_group().
  TORCH_ARG(c10::intrusive_ptr<c10d::ProcessGroup>, process_group);

  /// Broadcast rank 0's buffers (e.g. running statistics of batch norm) at construction and before
  /// each training forward.
  TORCH_ARG(bool, broadcast_buffers) = false;

 public:
  /// limits() in MiB, as Python's option of this name; see BucketLimits::in_mib().
  DistributedDataParallelOptions& bucket_cap_mb(double mib) {
    reducer_.limits = BucketLimits::in_mib(mib);
    return *this;
  }

// Options of the same name in ReducerOptions, which documents them.
#define APEX_REDUCER_ARG(T, name)                 \
  DistributedDataParallelOptions& name(T value) { \
    reducer_.name = std::move(value);             \
    return *this;                                 \
  }                                               \
  const T& name() const noexcept { return reducer_.name; }
  APEX_REDUCER_ARG(BucketLimits, limits)
  APEX_REDUCER_ARG(bool, delay_allreduce)
  APEX_REDUCER_ARG(std::vector<int64_t>, trigger_parameters)
  APEX_REDUCER_ARG(bool, gradient_as_bucket_view)
  APEX_REDUCER_ARG(bool, allreduce_always_fp32)
  APEX_REDUCER_ARG(bool, gradient_average)
  APEX_REDUCER_ARG(bool, weighted)
  APEX_REDUCER_ARG(double, gradient_predivide_factor)
  APEX_REDUCER_ARG(bool, static_graph)
  APEX_REDUCER_ARG(bool, init_sync)
  APEX_REDUCER_ARG(bool, check_finite)
  APEX_REDUCER_ARG(std::optional<bool>, check_steps)
  APEX_REDUCER_ARG(bool, skip_failed_steps)
  APEX_REDUCER_ARG(std::optional<int64_t>, replica_check_every)
  APEX_REDUCER_ARG(OnDivergence, on_divergence)
#undef APEX_REDUCER_ARG

  /// The options of the reducer, as a plain struct.
  const ReducerOptions& reducer() const noexcept { return reducer_; }

 private:
  ReducerOptions reducer_;
};

/// Wraps a module so that backward averages its gradients over the ranks of a process group while
/// backward is still running. Reducer describes the steps.
///
/// The wrapped module is a module holder (`TORCH_MODULE(Net)`'s `Net`, `torch::nn::Sequential`), a
/// `std::shared_ptr` or `std::unique_ptr` to a module, or a reference to a module, which must
/// outlive the wrapper. The wrapper is not a module: parameters keep their names, and
/// `torch::save(model, path)` on any rank writes what it would write for the unwrapped module.
///
/// Construction is collective and blocks the host. forward() is collective only if it synchronizes
/// buffers. Not thread safe. A moved-from wrapper throws apex::Error when it is used.
template <typename Wrapped>
class DistributedDataParallel {
  static_assert(detail::ModuleOf<Wrapped>::known,
                "DistributedDataParallel wraps a module holder (Net of TORCH_MODULE(Net)), a "
                "std::shared_ptr to a module, or a module that is a variable; not a temporary "
                "NetImpl(), which nothing would own: write Net() or std::make_shared<NetImpl>()");
  using Module = typename detail::ModuleOf<Wrapped>::type;
  static_assert(!std::is_const_v<Module>,
                "DistributedDataParallel trains the module, so it cannot be const");
  static_assert(!detail::ModuleOf<Wrapped>::known || !std::is_same_v<Module, torch::nn::Module>,
                "torch::nn::Module has no forward(): give DistributedDataParallel a pointer to "
                "the class of the module itself");

 public:
  /// Verifies that all ranks hold the same model and broadcasts rank 0's parameters.
  /// @throws InvalidArgument, RankMismatch, CommunicationError as Reducer does; InvalidArgument for
  ///         a null module, or without a process group.
  explicit DistributedDataParallel(Wrapped module, DistributedDataParallelOptions options = {})
      : module_(required(std::move(module))), options_(std::move(options)) {
    if (!options_.process_group()) options_.process_group(apex::distributed::get_default_group());
    wrapper_ = std::make_unique<detail::Wrapper>(*module_, process_group(),
                                                 options_.broadcast_buffers(), options_.reducer());
  }

  /// The same for a module that the caller owns and that outlives the wrapper.
  explicit DistributedDataParallel(Module& module, DistributedDataParallelOptions options = {})
      : DistributedDataParallel(Wrapped(std::shared_ptr<Module>(std::shared_ptr<void>(), &module)),
                                std::move(options)) {}

  /// Calls the module's forward and returns what it returns.
  /// @throws Error if a parameter was added, removed or replaced since the module was wrapped.
  template <typename... Args>
  auto forward(Args&&... args) {
    if constexpr (!detail::TakesArguments<void, Module, Args...>::value) {
      static_assert(detail::TakesArguments<void, Module, Args...>::value,
                    "the wrapped module has no public forward() that takes these arguments");
    } else {
      detail::Wrapper& wrapper = here();
      const bool training = at::GradMode::is_enabled();
      if (training) wrapper.before_forward();
      if constexpr (std::is_void_v<decltype(module_->forward(std::forward<Args>(args)...))>) {
        module_->forward(std::forward<Args>(args)...);
      } else {
        auto output = module_->forward(std::forward<Args>(args)...);
        if (training) wrapper.reducer().watch_outputs(output_tensors(output));
        return output;
      }
    }
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// Returns a guard. While it lives, backward does not communicate, and gradients accumulate. The
  /// next synchronized backward includes what accumulated. Several guards may live at a time and
  /// end in any order. The wrapper must outlive them. Every rank must do the same.
  ///
  ///     {
  ///       const auto guard = model.no_sync();
  ///       loss_of(model.forward(x), y).backward();  // adds up
  ///     }
  ///     loss_of(model.forward(x), y).backward();    // the sum is averaged over the ranks
  [[nodiscard]] auto no_sync() {
    detail::Wrapper& wrapper = here();
    wrapper.stop_synchronizing();
    return c10::make_scope_exit([&wrapper] { wrapper.continue_synchronizing(); });
  }

  /// Returns a guard. While it lives, backwards are for samples of this weight: a number, or a
  /// tensor with one element on any device. Only one at a time. The wrapper must outlive it. See
  /// ReducerOptions::weighted and Reducer::begin_weight().
  ///
  ///     {
  ///       const auto guard = model.weight(static_cast<double>(x.size(0)));  // samples here
  ///       (model.forward(x) - y).square().sum().backward();
  ///     }  // gradients of the mean over the samples of all ranks
  template <typename Number>
  [[nodiscard]] auto weight(const Number& weight) {
    Reducer& reducer = here().reducer();
    reducer.begin_weight(weight);
    return c10::make_scope_exit([&reducer] { reducer.end_weight(); });
  }

  /// Returns a guard for ranks with different numbers of batches: construct it before the loop over
  /// them, on every rank. At its end, a rank that finishes early takes part in the others'
  /// backwards with zeros until every rank has finished. It then receives the parameters and
  /// buffers of a rank that had data to the end. Blocks meanwhile, and throws CommunicationError or
  /// RankMismatch; guard.end() does the same before the end of the scope. If an exception leaves
  /// the loop, the guard ends without waiting for other ranks. The wrapper must outlive it.
  ///
  ///     {
  ///       const auto guard = model.join();
  ///       for (const auto& [x, y] : batches) {  // as many as this rank has
  ///         optimizer.zero_grad();
  ///         loss_of(model.forward(x), y).backward();
  ///         optimizer.step();
  ///       }
  ///     }
  ///
  /// The arguments are those of Reducer::begin_join(). Neither buffers in forwards nor optimizer
  /// states are exchanged: if they matter (momentum), all ranks should end together.
  /// @throws Error inside another join(), and for a module with SyncBatchNorm.
  Join join(bool divide_by_initial_world_size = true, bool throw_on_early_termination = false) {
    here().begin_join(divide_by_initial_world_size, throw_on_early_termination);
    return Join(*wrapper_);
  }

  /// Skips a step on all ranks together; see Reducer::skip_step().
  ///
  ///     at::Tensor loss = x.size(0) > 0 ? loss_of(model.forward(x), y) : model.skip_step();
  ///     loss.backward();
  ///     optimizer.step();  // does nothing if a rank has skipped: every gradient is undefined
  at::Tensor skip_step() { return here().reducer().skip_step(); }
  /// Whether the last synchronized backward was skipped, the same on every rank.
  bool step_skipped() const { return here().reducer().step_skipped(); }

  /// Replaces the all-reduce of every bucket; nullptr restores it. See Reducer::set_comm_hook().
  void register_comm_hook(std::shared_ptr<CommHook> hook) {
    here().reducer().set_comm_hook(std::move(hook));
  }

  /// The wrapped module: `model->fc1`, `model->named_buffers()`, `model.module()`.
  Wrapped& module() { return module_; }
  const Wrapped& module() const { return module_; }
  auto* operator->() { return &own(); }
  const auto* operator->() const { return &own(); }

  /// Same as the module's own functions.
  std::vector<at::Tensor> parameters(bool recurse = true) const {
    return own().parameters(recurse);
  }
  void zero_grad(bool set_to_none = true) { own().zero_grad(set_to_none); }
  void train(bool on = true) { own().train(on); }
  void eval() { own().eval(); }

  /// Calls the module's to(device), to(dtype) or to(device, dtype). Every rank must make the same
  /// call, outside of a forward and its backward. The next forward plans new buckets.
  template <typename... Args>
  void to(Args&&... args) {
    own().to(std::forward<Args>(args)...);
  }

  /// For torch::save() and torch::load(): the wrapped module.
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const DistributedDataParallel& model) {
    model.own().save(archive);
    return archive;
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    DistributedDataParallel& model) {
    model.own().load(archive);
    return archive;
  }

  /// The options, with the process group in use.
  const DistributedDataParallelOptions& options() const noexcept { return options_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const {
    return options_.process_group();
  }
  /// The reducer, for its counters and plan.
  Reducer& reducer() { return here().reducer(); }

 private:
  detail::Wrapper& here() const {
    if (wrapper_) return *wrapper_;
    throw Error(
        "DistributedDataParallel: this object was moved from: use the one that it was moved to");
  }
  Module& own() { return here(), *module_; }
  const Module& own() const { return here(), *module_; }

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

  Wrapped module_;
  DistributedDataParallelOptions options_;  ///< with the process group
  std::unique_ptr<detail::Wrapper> wrapper_;
};

/// Deduces the wrapper for a module variable: DistributedDataParallel model(net) for NetImpl net.
template <typename Module,
          typename = std::enable_if_t<std::is_base_of_v<torch::nn::Module, Module>>>
DistributedDataParallel(Module&, DistributedDataParallelOptions = {})
    -> DistributedDataParallel<std::shared_ptr<Module>>;

}  // namespace apex::parallel
