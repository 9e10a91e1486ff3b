#include <apex/parallel/reducer.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <unordered_set>
#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <apex/error.h>

#include "comm/separate_group.h"
#include "comm/collectives.h"
#include "parallel/reducer_state.h"
#include "reducer/registry.h"

namespace apex::parallel {

namespace detail {

namespace {

/// Autograd's compiled mode traces hooks; ours reduce gradients while the trace would only be
/// recorded.
constexpr const char* kNoCompiledAutograd =
    "apex's gradient reducer cannot be traced by compiled autograd: run backward() without "
    "torch._dynamo.config.compiled_autograd (torch.compile of the model itself is fine)";

/// Runs after a parameter's gradient was accumulated, on the autograd thread, without Python.
class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::weak_ptr<ReducerState> state, size_t index)
      : state_(std::move(state)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    // By reference: one more owner of the gradient that came in would count, see has_one_owner().
    static const at::Tensor none;
    if (const auto state = state_.lock()) {
      state->gradient_ready(index_, inputs.empty() ? none : inputs.front());
    }
    return outputs;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    throw Error(kNoCompiledAutograd);
  }

 private:
  std::weak_ptr<ReducerState> state_;
  size_t index_;
};

/// Runs when backward enters through an output of the model. Keeps the reducer alive for as long as
/// there may be something to synchronize.
class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(std::shared_ptr<ReducerState> state, std::shared_ptr<const ReducerState::Output> output)
      : state_(std::move(state)), output_(std::move(output)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (output_->forward) output_->forward->reached = true;
    enter_backward(*state_);
    return grads;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    throw Error(kNoCompiledAutograd);
  }

 private:
  std::shared_ptr<ReducerState> state_;
  std::shared_ptr<const ReducerState::Output> output_;
};

void check_options(const ReducerOptions& options, size_t parameters, size_t groups) {
  if (groups == 0) throw InvalidArgument("a reducer needs at least one process group");
  if (options.limits.cap < 0) {
    throw InvalidArgument("the bucket size (message_size, bucket_cap_mb) must be positive, got " +
                          std::to_string(options.limits.cap));
  }
  if (options.limits.first_cap < 0) {
    throw InvalidArgument("the size of the first bucket must not be negative, got " +
                          std::to_string(options.limits.first_cap));
  }
  if (options.limits.cap == 0 && options.limits.first_cap > 0) {
    throw InvalidArgument("the size of the first bucket goes with one for the others (limits.cap)");
  }
  const double factor = options.gradient_predivide_factor;
  if (!(factor > 0) || !std::isfinite(factor)) {
    throw InvalidArgument("gradient_predivide_factor must be positive and finite, got " +
                          std::to_string(factor));
  }
  if (options.delay_allreduce && !options.trigger_parameters.empty()) {
    throw InvalidArgument(
        "delay_allreduce launches nothing before the end of backward, so allreduce_trigger_params "
        "cannot have an effect: give one of the two");
  }
  if (options.auto_buckets && (options.delay_allreduce || !options.trigger_parameters.empty())) {
    throw InvalidArgument(
        "message_size=\"auto\" chooses the buckets, and so do delay_allreduce and "
        "allreduce_trigger_params: give one of them");
  }
  for (const int64_t index : options.trigger_parameters) {
    if (index < 0 || static_cast<size_t>(index) >= parameters) {
      throw InvalidArgument("trigger parameter " + std::to_string(index) + " is not one of the " +
                            std::to_string(parameters) + " parameters");
    }
  }
}

void check_trainable(const NamedTensor& parameter, int rank) {
  const at::Tensor& tensor = parameter.tensor;
  const at::ScalarType dtype = tensor.scalar_type();
  const bool can_be_averaged = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
                               dtype == at::kBFloat16 || dtype == at::kComplexFloat ||
                               dtype == at::kComplexDouble;
  std::ostringstream out;
  if (!can_be_averaged) {
    out << "rank " << rank << ": parameter '" << parameter.name << "' requires a gradient and has dtype "
        << dtype
        << ", which cannot be averaged over ranks: use float32, float64, float16, bfloat16, "
           "complex64 or complex128, or freeze it with requires_grad_(False)";
    throw InvalidArgument(out.str());
  }
  if (!tensor.is_leaf()) {
    out << "rank " << rank << ": parameter '" << parameter.name
        << "' is the result of an operation, not a leaf: it never gets a .grad; pass the tensor that "
           "it was computed from";
    throw InvalidArgument(out.str());
  }
}

std::vector<std::string> settings_of(const ReducerOptions& options, size_t groups) {
  auto text = [](const char* name, auto value) {
    std::ostringstream out;
    out << name << '=' << value;
    return out.str();
  };
  std::string triggers;
  for (const int64_t index : options.trigger_parameters) triggers += std::to_string(index) + ' ';
  std::vector<std::string> settings = options.settings;
  const std::vector<std::string> own{
          text("bucket size", options.limits.cap),
          text("first bucket size", options.limits.first_cap),
          text("bucket size in bytes", options.limits.unit == BucketLimits::Unit::kBytes),
          text("message_size=\"auto\"", options.auto_buckets),
          text("delay_allreduce", options.delay_allreduce),
          text("allreduce_trigger_params", triggers),
          text("allreduce_always_fp32", options.allreduce_always_fp32),
          text("gradient_average", options.gradient_average),
          text("gradient_predivide_factor", options.gradient_predivide_factor),
          text("static_graph", options.static_graph),
          text("init_sync", options.init_sync),
          text("communicators", groups),
          text("check_finite", options.check_finite),
          text("check_reduction (check_steps)", options.check_steps.has_value() ? *options.check_steps : -1)};
  settings.insert(settings.end(), own.begin(), own.end());
  return settings;
}

}  // namespace

ReducerState::ReducerState(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
                           ReducerOptions options)
    : options_(std::move(options)),
      parent_(groups.empty() ? nullptr : groups.front()),
      groups_(std::move(groups)),
      rank_(groups_.empty() ? 0 : groups_.front()->getRank()),
      world_size_(groups_.empty() ? 1 : groups_.front()->getSize()),
      active_ranks_(world_size_) {
  check_options(options_, parameters.size(), groups_.size());
  std::unordered_set<const void*> seen;
  for (NamedTensor& parameter : parameters) {
    if (!parameter.tensor.defined()) {
      throw InvalidArgument("parameter '" + parameter.name + "' is undefined");
    }
    if (!seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
    named_.push_back(std::move(parameter));
  }
  if (named_.size() != parameters.size() && !options_.trigger_parameters.empty()) {
    throw InvalidArgument("trigger parameters need a list of parameters without repetitions");
  }
  for (const NamedTensor& parameter : named_) {
    Parameter entry;
    entry.name = parameter.name;
    entry.variable = parameter.tensor;
    // What accumulated before is local still: the next synchronized backward takes it along.
    entry.touched = entry.variable.is_leaf() && entry.variable.grad().defined();
    if (entry.touched) entry.touched_version = entry.variable._version();
    entry.owner = owner_of(entry.variable);
    parameters_.push_back(std::move(entry));
  }
  used_.assign(parameters_.size(), 0);
  kept_.assign(parameters_.size(), 0);
}

ReducerState::~ReducerState() {
  retire();
  unhook_parameters();
  forget_plan();
  carried_.clear();
  drop_reducer(this);
}

void ReducerState::synchronize_model() {
  verify_same_model(named_, settings_of(options_, groups_.size()), parent_);
  for (const NamedTensor& parameter : named_) {
    if (parameter.tensor.requires_grad()) check_trainable(parameter, rank_);
  }
  remember_processes(*parent_);
  separate_groups();
  if (!options_.init_sync) return;
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : named_) tensors.push_back(parameter.tensor);
  broadcast_coalesced(tensors, groups_.front(), 0, kBroadcastBytes, "broadcast of parameters");
}

void ReducerState::separate_groups() {
  if (world_size_ == 1) return;
  // Ranks may have failed to construct different numbers of reducers; a name must be new to all of them.
  static std::atomic<int64_t> next_name{0};
  const int64_t name =
      agree(at::full({1}, next_name.load(), at::kLong), c10d::ReduceOp::MAX, "naming of a communicator")
          .item<int64_t>();
  next_name.store(name + 1);
  for (size_t i = 0; i < groups_.size(); ++i) {
    const std::string unique = "apex/reducer/" + parent_->getGroupName() + "/" + std::to_string(name) + "/" +
                               std::to_string(i);
    try {
      groups_[i] = make_separate_group(groups_[i], unique);
    } catch (...) {
      throw_communication_error("connecting a reducer's communicator", *parent_, std::current_exception());
    }
    hear_too(*groups_[i], *parent_);
  }
}

void ReducerState::own_parameters() {
  const Lock lock(mutex_);
  if (scope_ != nullptr) return;
  for (Parameter& parameter : parameters_) parameter.owner->store(this, std::memory_order_relaxed);
}

bool ReducerState::owns(const Parameter& parameter) const {
  const void* owner = parameter.owner->load(std::memory_order_relaxed);
  // Retired, and nobody else has taken it: graphs of this reducer's outputs are synchronized all the same.
  return owner == this || (owner == nullptr && retired_.load(std::memory_order_relaxed));
}

void ReducerState::retire() {
  retired_.store(true);
  for (Parameter& parameter : parameters_) {
    const void* mine = this;
    parameter.owner->compare_exchange_strong(mine, nullptr);
  }
}

void ReducerState::hook_parameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.trainable = parameter.variable.requires_grad();
    parameter.dtype = parameter.variable.scalar_type();
    parameter.device = parameter.variable.device();
    parameter.strides = parameter.variable.strides().vec();
    if (!parameter.trainable) continue;
    ever_trainable_ = true;
    check_trainable(named_[i], rank_);
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.variable);
    parameter.hook = parameter.accumulator->add_post_hook(
        std::make_unique<GradientHook>(weak_from_this(), i));
  }
}

void ReducerState::unhook_parameters() {
  for (Parameter& parameter : parameters_) {
    if (parameter.accumulator) parameter.accumulator->del_post_hook(parameter.hook);
    parameter.accumulator = {};
    parameter.hook = 0;
  }
}

bool ReducerState::parameters_changed() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& parameter) {
    const at::Tensor& variable = parameter.variable;
    // Module.double() and its like replace the accumulator, and with it the hook, also where the dtype is the
    // same again afterwards.
    return variable.requires_grad() != parameter.trainable || variable.scalar_type() != parameter.dtype ||
           variable.device() != parameter.device || variable.strides() != parameter.strides ||
           (parameter.trainable &&
            torch::autograd::impl::try_get_grad_accumulator(variable) != parameter.accumulator);
  });
}

// Note [Parameters that are frozen or unfrozen]
//
// A change of dtype, device or strides leaves the buckets without use: they are made anew, and every rank has to
// make the change before the same forward. Freezing and unfreezing, however, may well depend on what a rank
// has seen, and ranks that forgot the plan at different times would meet in collectives of different
// sizes. So the rank keeps the plan, and asks the others in the next synchronized backward for a new one:
// by one of the facts in its last message. A frozen parameter counts as not used in that backward; one that was
// unfrozen is reduced at its end, when all ranks have agreed on the new plan. The facts have to be
// read after every backward, which costs nothing where the message lies on the CPU; elsewhere the host
// would have to wait for the device, and ranks have to freeze and unfreeze alike.

void ReducerState::follow_change() {
  complete_deferred();
  bool same_kind = true;
  bool same_set = true;
  for (const Parameter& parameter : parameters_) {
    same_kind = same_kind && parameter.variable.scalar_type() == parameter.dtype &&
                parameter.variable.device() == parameter.device &&
                parameter.variable.strides() == parameter.strides;
    same_set = same_set && parameter.variable.requires_grad() == parameter.trainable;
  }
  if (!same_kind) {
    refresh(ReasonToLeave::kParameters);
    return;
  }
  unhook_parameters();
  hook_parameters();
  if (same_set) return;
  if (defers_) leave_plan(ReasonToLeave::kParameters);  // else choose_plan() sees to it
}

void ReducerState::refresh(ReasonToLeave reason) {
  unhook_parameters();
  hook_parameters();
  leave_plan(reason);
}

/// All-reduces a small tensor of facts, which every rank then has on the CPU. Blocks the host.
at::Tensor ReducerState::agree(const at::Tensor& mine, c10d::ReduceOp::RedOpType op,
                               const std::string& what) const {
  if (world_size_ == 1) return mine.to(at::kCPU, mine.scalar_type(), false, /*copy=*/true);  // as in launch()
  const GroupPtr& group = groups_.front();
  const at::Device device =
      control_device(group, parameters_.empty() ? at::Device(at::kCPU)
                                                : parameters_.front().variable.device());
  std::vector<at::Tensor> message{mine.to(device, mine.scalar_type(), false, /*copy=*/true)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  wait_collective(call_collective(what, *group, [&] { return group->allreduce(message, options); }),
                  what, *group);
  return message.front().cpu();
}

void ReducerState::release() {
  if (in_flight_) drop_messages();
  forget_plan();
  carried_.clear();
  carried_hook_.reset();
  failure_ = {};
  details_ = {};
  comm_hook_.reset();
  callback_ = nullptr;
  groups_.clear();
  parent_.reset();
}

}  // namespace detail

using detail::ReducerState;

namespace {

void check_between_backwards(ReducerState& state, const char* what) {
  if (state.scope_ != nullptr) throw Error(std::string(what) + " while a backward is running");
  state.complete_deferred();
}

}  // namespace

Reducer::Reducer(std::vector<NamedTensor> parameters, std::vector<detail::GroupPtr> groups,
                 ReducerOptions options)
    : state_(std::make_shared<ReducerState>(std::move(parameters), std::move(groups),
                                            std::move(options))) {
  state_->synchronize_model();
  detail::add_reducer(state_);
  for (auto& parameter : state_->parameters_) parameter.seen_version = parameter.variable._version();
  state_->own_parameters();
  state_->hook_parameters();
}

Reducer::~Reducer() { state_->retire(); }

void Reducer::prepare_for_forward(bool training) {
  const ReducerState::Lock lock(state_->mutex_);
  if (training) state_->steps_.forward_began();
  if (state_->scope_ == nullptr && state_->parameters_changed()) state_->follow_change();
}

void Reducer::watch_outputs(const std::vector<at::Tensor>& outputs) {
  const auto can_be_reached = [](const at::Tensor& output) {
    return output.defined() && output.requires_grad() && output.grad_fn();
  };
  StepTracker::ForwardPtr forward;
  {
    const ReducerState::Lock lock(state_->mutex_);
    forward = state_->steps_.forward_ended(std::any_of(outputs.begin(), outputs.end(), can_be_reached));
  }
  torch::autograd::Node* last = nullptr;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    const auto& node = output.grad_fn();
    // A leaf has no node to hook (and keeps its hooks for ever): it is a parameter, hooked already,
    // or nothing to do with parameters. Outputs of one operation need one hook.
    if (!node || node.get() == last) continue;
    last = node.get();
    auto watched = std::make_shared<const ReducerState::Output>(ReducerState::Output{last, forward});
    state_->watch(watched);
    node->add_pre_hook(std::make_unique<detail::OutputHook>(state_, std::move(watched)));
  }
}

void Reducer::set_synchronizing(bool on) { state_->synchronizing_.store(on); }

bool Reducer::synchronizing() const { return state_->synchronizing_.load(); }

void Reducer::set_comm_hook(std::shared_ptr<CommHook> hook) {
  const ReducerState::Lock lock(state_->mutex_);
  check_between_backwards(*state_, "set_comm_hook()");
  state_->leave_plan(ReasonToLeave::kCommHook);  // with the hook by which it was made
  state_->comm_hook_ = std::move(hook);
}

void Reducer::relearn() {
  const ReducerState::Lock lock(state_->mutex_);
  check_between_backwards(*state_, "relearn()");
  state_->refresh(ReasonToLeave::kRelearn);
}

void Reducer::release() {
  const ReducerState::Lock lock(state_->mutex_);
  if (state_->scope_ != nullptr) throw Error("release() while a backward is running");
  state_->release();
}

void Reducer::release_all() {
  auto alive = detail::all_reducers();
  for (const auto& state : alive) {
    const ReducerState::Lock lock(state->mutex_);
    if (state->scope_ == nullptr) state->release();
  }
  alive.clear();
  finish_dropped_groups();
}

void Reducer::set_bucket_callback(std::function<void(const ReducedBucket&)> callback) {
  const ReducerState::Lock lock(state_->mutex_);
  check_between_backwards(*state_, "set_bucket_callback()");
  state_->callback_ = std::move(callback);
}

void Reducer::set_deferred(bool on) {
  const ReducerState::Lock lock(state_->mutex_);
  check_between_backwards(*state_, "set_deferred()");
  if (state_->defers_ == on) return;
  state_->defers_ = on;
  state_->refresh(ReasonToLeave::kDeferred);
}

void Reducer::wait_for(const std::vector<int64_t>& parameters) {
  const ReducerState::Lock lock(state_->mutex_);
  // Also from a checkpointed segment that backward runs again: then nothing is in flight.
  state_->wait_for(parameters);
}

void Reducer::wait() {
  const ReducerState::Lock lock(state_->mutex_);
  check_between_backwards(*state_, "wait()");
}

std::vector<int64_t> Reducer::in_flight() const {
  const ReducerState::Lock lock(state_->mutex_);
  return state_->parameters_in_flight();
}

void Reducer::begin_join(bool divide_by_initial_world_size) {
  const ReducerState::Lock lock(state_->mutex_);
  check_between_backwards(*state_, "begin_join()");
  state_->joining_ = true;
  state_->divide_by_initial_ = divide_by_initial_world_size;
  state_->active_ranks_ = state_->world_size_;
}

void Reducer::end_join() {
  const ReducerState::Lock lock(state_->mutex_);
  state_->joining_ = false;
  // Ranks without data have not done what the others did.
  state_->steps_.forget();
  for (auto& parameter : state_->parameters_) parameter.seen_version = parameter.variable._version();
}

JoinEvent Reducer::announce(JoinEvent::Kind kind, int64_t argument) {
  const ReducerState::Lock lock(state_->mutex_);
  return state_->exchange_event(true, kind, argument);
}

JoinEvent Reducer::await_event() {
  const ReducerState::Lock lock(state_->mutex_);
  return state_->exchange_event(false, JoinEvent::kEnd, 0);
}

void Reducer::shadow_backward_begin(bool gradients_were_kept) {
  const ReducerState::Lock lock(state_->mutex_);
  state_->shadow_backward_begin(gradients_were_kept);
}

int64_t Reducer::follow_until_end(const std::function<void(const JoinEvent&)>& on_forward) {
  bool followed = false;
  for (JoinEvent event = await_event(); event.kind != JoinEvent::kEnd; event = await_event()) {
    followed = true;
    if (event.kind == JoinEvent::kForward) {
      prepare_for_forward(/*training=*/false);
      on_forward(event);
    } else if (event.kind == JoinEvent::kBackward) {
      shadow_backward_begin(event.argument != 0);
      shadow_backward_end();
    }
  }
  end_join();
  return last_with_data(followed);
}

int64_t Reducer::last_with_data(bool followed, int64_t scalers) const {
  const ReducerState::Lock lock(state_->mutex_);
  return state_->last_with_data(followed, scalers);
}

void Reducer::shadow_backward_end() {
  const ReducerState::Lock lock(state_->mutex_);
  state_->shadow_backward_end();
}

void Reducer::optimizer_stepped(const std::vector<at::Tensor>& parameters, int64_t optimizer) {
  for (const auto& state : detail::owners_of(parameters)) {
    const ReducerState::Lock lock(state->mutex_);
    state->steps_.optimizer_stepped(optimizer);
  }
}

c10::intrusive_ptr<c10d::ProcessGroup> Reducer::communicator() const {
  const ReducerState::Lock lock(state_->mutex_);
  return state_->groups_.empty() ? nullptr : state_->groups_.front();
}

std::optional<BucketPlan> Reducer::plan() const {
  const ReducerState::Lock lock(state_->mutex_);
  if (state_->learning_) return std::nullopt;
  return state_->plan_;
}

void Reducer::set_plan(const BucketPlan& plan) {
  const ReducerState::Lock lock(state_->mutex_);
  check_between_backwards(*state_, "set_plan()");
  state_->preset_plan(plan);
}

std::vector<at::Tensor> Reducer::buffers() const {
  const ReducerState::Lock lock(state_->mutex_);
  std::vector<at::Tensor> buffers;
  if (state_->learning_) return buffers;
  state_->complete_deferred();
  for (size_t i = 0; i < state_->plan_.buckets.size(); ++i) {
    buffers.push_back(state_->entries_[i].bucket.gradients_buffer());
  }
  return buffers;
}

const std::vector<NamedTensor>& Reducer::parameters() const { return state_->named_; }

void Reducer::record_overlap(bool on) {
  const ReducerState::Lock lock(state_->mutex_);
  check_between_backwards(*state_, "record_overlap()");
  if (on == (state_->overlap_ != nullptr)) return;
  state_->overlap_ = on ? std::make_unique<detail::OverlapRecorder>() : nullptr;
}

std::optional<OverlapReport> Reducer::overlap_report() const {
  const ReducerState::Lock lock(state_->mutex_);
  return state_->overlap_report();
}

ReducerStatistics Reducer::statistics() const {
  const ReducerState::Lock lock(state_->mutex_);
  return state_->statistics_;
}

}  // namespace apex::parallel
