// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <apex/distributed/process_group.h>
#include <apex/error.h>
#include <apex/parallel/detail/model_sync.h>
#include <apex/parallel/detail/output_tensors.h>
#include <apex/parallel/guards.h>
#include <apex/parallel/reducer.h>
#include <apex/parallel/sync_batch_norm.h>

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
///         Net(), apex::parallel::DistributedDataParallelOptions().bucket_cap_mb(25)
///                    .gradient_as_bucket_view(true));
///
/// A process group alone converts to options: DistributedDataParallel(Net(), group). The wrapper's
/// constructor refuses options that contradict each other.
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
  /// Size at which a bucket is closed, in MiB. The first bucket of each dtype holds at most 1 MiB;
  /// use limits() to change that. Infinity means a single bucket after the first. Python's option
  /// of this name has the same meaning, so ranks of both languages with the same value agree.
  /// @throws InvalidArgument if it is not positive.
  DistributedDataParallelOptions& bucket_cap_mb(double mib) {
    if (!(mib > 0)) {
      throw InvalidArgument("bucket_cap_mb is " + std::to_string(mib) + "; it must be positive");
    }
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    const double bytes = mib * (1 << 20);
    reducer_.limits = BucketLimits::in_bytes(bytes < static_cast<double>(kMost)
                                                 ? std::max<int64_t>(1, static_cast<int64_t>(bytes))
                                                 : kMost);
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
  APEX_REDUCER_ARG(bool, registered_buffers)
  APEX_REDUCER_ARG(bool, init_sync)
  APEX_REDUCER_ARG(bool, check_finite)
  APEX_REDUCER_ARG(std::optional<bool>, check_steps)
  APEX_REDUCER_ARG(bool, skip_failed_steps)
  APEX_REDUCER_ARG(std::optional<int64_t>, replica_check_every)
  APEX_REDUCER_ARG(OnDivergence, on_divergence)
#undef APEX_REDUCER_ARG

  /// The options of the reducer, as a plain struct.
  ReducerOptions& reducer() noexcept { return reducer_; }
  const ReducerOptions& reducer() const noexcept { return reducer_; }

 private:
  ReducerOptions reducer_;
};

namespace detail {

/// The module class that a holder or a smart pointer refers to.
template <typename Wrapped, typename = void>
struct ModuleOf {
  using type = torch::nn::Module;
  static constexpr bool known = false;
};
template <typename Wrapped>
struct ModuleOf<Wrapped, std::void_t<decltype(*std::declval<Wrapped&>())>> {
  using type = std::remove_reference_t<decltype(*std::declval<Wrapped&>())>;
  static constexpr bool known = std::is_base_of_v<torch::nn::Module, type>;
};

/// The addresses of a module's own parameters. Module::parameters() copies the names, which took 45
/// us in every forward for 400 parameters; this takes 1 us.
struct OwnParameters : torch::nn::Module {
  static void add_addresses(const torch::nn::Module& module, std::vector<const void*>& addresses) {
    for (const auto& item : module.*(&OwnParameters::parameters_))
      addresses.push_back(item.value().unsafeGetTensorImpl());
  }
};

template <typename Void, typename Module, typename... Args>
struct TakesArguments : std::false_type {};
template <typename Module, typename... Args>
struct TakesArguments<
    std::void_t<decltype(std::declval<Module&>().forward(std::declval<Args>()...))>, Module,
    Args...> : std::true_type {};

}  // namespace detail

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
  /// Verifies that all ranks hold the same model and broadcasts rank 0's parameters, including
  /// frozen ones.
  /// @throws InvalidArgument, RankMismatch, CommunicationError as Reducer does; InvalidArgument for
  ///         a null module, or without a process group.
  explicit DistributedDataParallel(Wrapped module, DistributedDataParallelOptions options = {})
      : module_(required(std::move(module))),
        options_(with_group(std::move(options))),
        buffers_(options_.broadcast_buffers() ? describe_buffers() : std::vector<std::string>()),
        reducer_(make_reducer()),
        no_sync_(std::make_shared<detail::NoSyncGuards>(detail::NoSyncGuards{*reducer_})),
        parameters_(identities()) {
    name_layers(*module_);
    if (options_.broadcast_buffers()) {
      std::vector<NamedTensor> named;
      for (const auto& item : module_->named_buffers()) named.push_back({item.key(), item.value()});
      require_sendable(named, "buffer", process_group());
      if (options_.init_sync()) synchronize_buffers();
    }
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
      Module& module = own();
      const bool training = at::GradMode::is_enabled();
      if (training) before_forward();
      if constexpr (std::is_void_v<decltype(module.forward(std::forward<Args>(args)...))>) {
        module.forward(std::forward<Args>(args)...);
      } else {
        auto output = module.forward(std::forward<Args>(args)...);
        if (training) reducer_->watch_outputs(output_tensors(output));
        return output;
      }
    }
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  using NoSync = parallel::NoSync;
  using Join = parallel::Join;

  /// See NoSync.
  ///
  ///     {
  ///       const auto guard = model.no_sync();
  ///       loss_of(model.forward(x), y).backward();  // adds up
  ///     }
  ///     loss_of(model.forward(x), y).backward();    // the sum is averaged over the ranks
  NoSync no_sync() {
    require_here();
    return NoSync(no_sync_);
  }

  /// See Weight and ReducerOptions::weighted.
  ///
  ///     {
  ///       const auto guard = model.weight(static_cast<double>(x.size(0)));  // samples here
  ///       (model.forward(x) - y).square().sum().backward();
  ///     }  // gradients of the mean over the samples of all ranks
  ///
  /// `weight` is a number, or a tensor with one element on any device.
  Weight weight(const at::Tensor& weight) {
    require_here();
    return {*reducer_, weight};
  }
  Weight weight(double weight) {
    require_here();
    return {*reducer_, weight};
  }

  /// See Join.
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
  /// The arguments are those of Reducer::begin_join(). Buffers are not synchronized in forwards.
  /// Optimizer states are not exchanged: if they matter (momentum), all ranks should end together.
  /// @throws Error inside another join(), and for a module with SyncBatchNorm, whose collectives
  /// need
  ///         every rank.
  Join join(bool divide_by_initial_world_size = true, bool throw_on_early_termination = false) {
    require_here();
    for (const std::shared_ptr<torch::nn::Module>& module : module_->modules()) {
      if (module->as<SyncBatchNormImpl>() == nullptr) continue;
      throw Error(
          "DistributedDataParallel.join() with SyncBatchNorm is not supported: use BatchNorm, or "
          "the "
          "same number of batches on every rank");
    }
    reducer_->begin_join(divide_by_initial_world_size, throw_on_early_termination);
    joining_ = true;
    return Join([this] { end_join(); }, [this] { leave_join(); });
  }

  /// Skips a step on all ranks together; see Reducer::skip_step().
  ///
  ///     at::Tensor loss = x.size(0) > 0 ? loss_of(model.forward(x), y) : model.skip_step();
  ///     loss.backward();
  ///     optimizer.step();  // does nothing if a rank has skipped: every gradient is undefined
  at::Tensor skip_step() {
    require_here();
    return reducer_->skip_step();
  }
  /// Whether the last synchronized backward was skipped, the same on every rank.
  bool step_skipped() const {
    require_here();
    return reducer_->step_skipped();
  }

  /// The wrapped module: `model->fc1`, `model.module()`.
  Wrapped& module() { return module_; }
  const Wrapped& module() const { return module_; }
  auto* operator->() { return &own(); }
  const auto* operator->() const { return &own(); }

  /// Same as the module's own functions.
  std::vector<at::Tensor> parameters(bool recurse = true) const {
    return own().parameters(recurse);
  }
  torch::OrderedDict<std::string, at::Tensor> named_parameters(bool recurse = true) const {
    return own().named_parameters(recurse);
  }
  std::vector<at::Tensor> buffers(bool recurse = true) const { return own().buffers(recurse); }
  torch::OrderedDict<std::string, at::Tensor> named_buffers(bool recurse = true) const {
    return own().named_buffers(recurse);
  }
  void zero_grad(bool set_to_none = true) { own().zero_grad(set_to_none); }
  void train(bool on = true) { own().train(on); }
  void eval() { own().eval(); }
  bool is_training() const { return own().is_training(); }

  /// Calls the module's to(device), to(dtype) or to(device, dtype). Every rank must make the same
  /// call, outside of a forward and its backward. The next forward plans new buckets.
  template <typename... Args>
  void to(Args&&... args) {
    own().to(std::forward<Args>(args)...);
  }

  /// Serialize the wrapped module, so that torch::save() and torch::load() accept the wrapper.
  void save(torch::serialize::OutputArchive& archive) const { own().save(archive); }
  void load(torch::serialize::InputArchive& archive) { own().load(archive); }
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const DistributedDataParallel& model) {
    model.save(archive);
    return archive;
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    DistributedDataParallel& model) {
    model.load(archive);
    return archive;
  }

  /// Prints the rank and the module.
  friend std::ostream& operator<<(std::ostream& stream, const DistributedDataParallel& model) {
    std::ostringstream text;
    text << static_cast<const torch::nn::Module&>(model.own());
    std::istringstream lines(text.str());
    stream << "apex::parallel::DistributedDataParallel(rank " << model.process_group()->getRank()
           << " of " << model.process_group()->getSize() << "\n  (module): ";
    std::string line;
    for (bool first = true; std::getline(lines, line); first = false) {
      stream << (first ? "" : "  ") << line << "\n";
    }
    return stream << ")";
  }

  /// Replaces the all-reduce of every bucket; nullptr restores it. See Reducer::set_comm_hook().
  void register_comm_hook(std::shared_ptr<CommHook> hook) {
    require_here();
    reducer_->set_comm_hook(std::move(hook));
  }

  /// The option static_graph.
  bool static_graph() const noexcept { return options_.static_graph(); }

  /// The options as passed in, with the process group in use.
  const DistributedDataParallelOptions& options() const noexcept { return options_; }

  /// The reducer, for its counters and plan.
  Reducer& reducer() {
    require_here();
    return *reducer_;
  }

  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const {
    return options_.process_group();
  }

 private:
  static DistributedDataParallelOptions with_group(DistributedDataParallelOptions options) {
    if (!options.process_group()) options.process_group(apex::distributed::get_default_group());
    return options;
  }

  /// Addresses of the module's parameters. The reducer keeps its parameters alive, so no other
  /// tensor can have the address of one of them.
  std::vector<const void*> identities() const {
    std::vector<const void*> found;
    found.reserve(parameters_.size());
    const torch::nn::Module& module = *module_;
    module.apply(
        [&](const torch::nn::Module& one) { detail::OwnParameters::add_addresses(one, found); });
    return found;
  }

  [[noreturn]] void refuse_other_parameters() const {
    std::string name;
    for (const auto& item : module_->named_parameters()) {
      const void* const one = item.value().unsafeGetTensorImpl();
      if (name.empty() &&
          std::find(parameters_.begin(), parameters_.end(), one) == parameters_.end())
        name = item.key();
    }
    throw Error("rank " + std::to_string(process_group()->getRank()) + ": " +
                (name.empty() ? "a parameter was removed"
                              : "parameter '" + name + "' was added or replaced") +
                " after the DistributedDataParallel was constructed, so its gradient would not be "
                "averaged: make such changes on every rank, and construct the wrapper again");
  }

  void before_forward() {
    if (identities() != parameters_) refuse_other_parameters();
    reducer_->prepare_for_forward();
    // Under join() some ranks may run no forward.
    if (options_.broadcast_buffers() && module_->is_training() && reducer_->synchronizing() &&
        !joining_)
      synchronize_buffers();
  }

  void require_here() const {
    if (reducer_) return;
    throw Error(
        "DistributedDataParallel: this object was moved from: use the one that it was moved to");
  }
  Module& own() {
    require_here();
    return *module_;
  }
  const Module& own() const {
    require_here();
    return *module_;
  }

  void leave_join() noexcept {
    joining_ = false;
    if (reducer_) reducer_->leave_join();
  }

  void end_join() {
    require_here();
    joining_ = false;
    // Python's join() passes the same list. Its ranks may be in this job.
    std::vector<at::Tensor> tensors = module_->parameters();
    for (const at::Tensor& buffer : module_->buffers()) {
      if (buffer.layout() == at::kStrided) tensors.push_back(buffer);
    }
    reducer_->end_join(tensors);
  }

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

  std::unique_ptr<Reducer> make_reducer() const {
    ReducerOptions options = options_.reducer();
    std::vector<NamedTensor> named;
    for (const auto& item : module_->named_parameters())
      named.push_back({item.key(), item.value()});
    if (options_.broadcast_buffers()) {
      // Compared between ranks, since all buffers travel in one message. Python's messages have a
      // header and differ, so its setting has another value.
      options.settings.push_back("broadcast_buffers=C++");
      options.settings.insert(options.settings.end(), buffers_.begin(), buffers_.end());
    }
    return std::make_unique<Reducer>(std::move(named), std::vector{process_group()},
                                     std::move(options));
  }

  std::vector<std::string> describe_buffers() const {
    std::vector<std::string> lines;
    for (const auto& item : module_->named_buffers()) {
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

  void synchronize_buffers() {
    if (describe_buffers() != buffers_) {
      throw Error("rank " + std::to_string(process_group()->getRank()) +
                  ": a buffer was added, removed, or changed its shape or dtype since the ranks "
                  "compared their buffers, so broadcast_buffers would mix up values: make such "
                  "changes on every rank, and construct the wrapper again");
    }
    std::vector<at::Tensor> buffers;
    for (const auto& item : module_->named_buffers()) {
      // variable_data(): the write does not bump the version of tensors that an earlier forward
      // saved. Batch norm's own update does not either, because its backward in training reads the
      // batch statistics.
      const bool running =
          ends_with(item.key(), "running_mean") || ends_with(item.key(), "running_var");
      buffers.push_back(running ? item.value().variable_data() : item.value());
    }
    broadcast_coalesced(buffers, process_group());
  }

  static bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() &&
           text.compare(text.size() - end.size(), end.size(), end) == 0;
  }

  Wrapped module_;
  DistributedDataParallelOptions options_;  ///< with the process group
  std::vector<std::string> buffers_;        ///< as the ranks compared them
  bool joining_ = false;
  std::unique_ptr<Reducer> reducer_;
  std::shared_ptr<detail::NoSyncGuards> no_sync_;
  std::vector<const void*> parameters_;  ///< the reducer's parameters; see identities()
};

/// Deduces the wrapper for a module variable: DistributedDataParallel model(net) for NetImpl net.
template <typename Module,
          typename = std::enable_if_t<std::is_base_of_v<torch::nn::Module, Module>>>
DistributedDataParallel(Module&, DistributedDataParallelOptions = {})
    -> DistributedDataParallel<std::shared_ptr<Module>>;

}  // namespace apex::parallel
