// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The parameters of a reducer: names, tensors, and the hooks on their gradients.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <apex/parallel/detail/model_sync.h>

#include "torch_version.h"

namespace apex::parallel::detail {

// Note [One parameter, one reducer]
//
// Several reducers may share a parameter: a module may be wrapped twice, a wrapper may be wrapped,
// and two wrapped modules may share layers. A replaced wrapper stays alive until the garbage
// collector runs, or as long as one of its outputs is referenced, which differs between ranks. If
// all these reducers acted on one gradient, it would be reduced twice, read while another reducer
// writes it, or reduced by some ranks only. So a parameter has one owner: the last constructed of
// the reducers that a backward reaches. The order of construction is the same on every rank; the
// orders of forwards (a rank may evaluate a model alone) and of destruction are not. Other reducers
// treat the parameter as frozen. Without an owner, the first reducer whose hook runs takes a
// parameter that backward reaches without an output of a reducer. Hooks run in the order of
// construction.

/// The owner of one parameter. Thread safe.
using ParameterOwner = std::atomic<const void*>;

/// The owner entry of `parameter`, which all reducers share. It lives as long as a reducer holds
/// it, and the parameter must live as long.
std::shared_ptr<ParameterOwner> owner_of(const at::Tensor& parameter);

using AccumulatorPtr = NodePtr;

/// The version of a parameter; 0 for an inference tensor, which has no version counter.
inline uint32_t version_of(const at::Tensor& variable) {
  return variable.is_inference() ? 0 : static_cast<uint32_t>(variable._version());
}

/// The properties of a parameter on which its place in a bucket depends.
struct ParameterKind {
  explicit ParameterKind(const at::Tensor& variable)
      : dtype(variable.scalar_type()),
        device(variable.device()),
        sizes(variable.sizes().vec()),
        strides(variable.strides().vec()) {}
  bool is_of(const at::Tensor& variable) const {
    return variable.scalar_type() == dtype && variable.device() == device &&
           variable.sizes() == sizes && variable.strides() == strides;
  }

  at::ScalarType dtype;
  at::Device device;
  std::vector<int64_t> sizes, strides;
};

struct Parameter {
  Parameter(std::string called, const at::Tensor& tensor)
      : name(std::move(called)), variable(tensor), kind(tensor), owner(owner_of(tensor)) {}

  std::string name;
  at::Tensor variable;

  // Those for which the hooks were made. If one changes, the hooks must be made again.
  ParameterKind kind;
  bool trainable = false;
  AccumulatorPtr accumulator;
  uintptr_t hook = 0;

  /// The reducer that averages it, if several share it; see Note [One parameter, one reducer].
  std::shared_ptr<ParameterOwner> owner;

  bool touched = false;          ///< got a gradient since the last synchronized backward
  uint32_t touched_version = 0;  ///< of the parameter, when it got the last such gradient
  uint32_t seen_version = 0;     ///< of the parameter, when the last synchronized backward began

  // The gradient of the last synchronized backward. Set without averaging and under join().
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> reduced{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  uint32_t reduced_version = 0;

  /// Whether .grad is unchanged since the last synchronized backward (if `reduced` was set).
  bool holds_reduced() const {
    const at::Tensor& grad = variable.grad();
    const auto last = reduced.lock();
    return grad.defined() && last && last.get() == grad.unsafeGetTensorImpl() &&
           grad._version() == reduced_version;
  }

  /// A gradient accumulates that is not averaged yet. The next synchronized backward includes it.
  void touch() {
    touched = true;
    touched_version = version_of(variable);
  }
};

/// The parameters of a reducer, with their hooks. It outlives plans and backwards. Only retire(),
/// own_all() and owns() are thread safe.
class ParameterTable {
 public:
  using MakeHook = std::function<std::unique_ptr<torch::autograd::FunctionPostHook>(size_t index)>;

  /// @param self  identifies the reducer among others that share its parameters.
  /// @throws InvalidArgument for an undefined tensor. A tensor that appears twice counts once.
  ParameterTable(std::vector<NamedTensor> parameters, const void* self);
  ~ParameterTable();
  ParameterTable(const ParameterTable&) = delete;
  ParameterTable& operator=(const ParameterTable&) = delete;

  size_t size() const { return parameters_.size(); }
  bool empty() const { return parameters_.empty(); }
  Parameter& operator[](size_t index) { return parameters_[index]; }
  const Parameter& operator[](size_t index) const { return parameters_[index]; }
  auto begin() { return parameters_.begin(); }
  auto end() { return parameters_.end(); }
  auto begin() const { return parameters_.begin(); }
  auto end() const { return parameters_.end(); }
  const std::vector<NamedTensor>& named() const { return named_; }

  /// @throws InvalidArgument, naming `rank`, for a trainable parameter that is no leaf or whose
  /// dtype cannot be averaged.
  void check_trainable(int rank) const;

  /// Records the properties of each parameter, and hooks trainable parameters without a hook. A
  /// frozen parameter stays hooked, because an older graph may still give it a gradient. Returns
  /// whether there are more hooked parameters than before.
  bool hook(int rank, const MakeHook& make_hook);
  void unhook();
  bool ever_trainable() const { return ever_trainable_; }

  /// Whether hooks must be made again.
  bool changed() const;
  /// Fingerprint of dtypes and shapes, which determine the sizes of messages.
  int64_t kinds() const;
  /// Whether dtypes, devices, shapes and strides are unchanged.
  bool same_kind() const;

  void own_all();
  bool owns(const Parameter& parameter) const;
  bool owns_any() const;
  /// Whether each parameter is trainable now and owned by this reducer.
  std::vector<bool> trained() const;
  /// The reducer is destroyed, and only graphs of its outputs refer to it. Other reducers may take
  /// its parameters.
  void retire();
  /// Takes all parameters that no reducer owns, if `parameter` is one of them.
  void own_orphans(const Parameter& parameter);
  bool retired() const { return retired_.load(); }

  /// Writes before this call are not seen.
  void forget_versions() {
    for (Parameter& one : parameters_) one.seen_version = version_of(one.variable);
  }

 private:
  std::vector<NamedTensor> named_;
  std::vector<Parameter> parameters_;
  const void* const self_;
  bool ever_trainable_ = false;
  std::atomic<bool> retired_{false};
};

}  // namespace apex::parallel::detail
