// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The parameters of a reducer: names, tensors, and the hooks on their gradients.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <apex/parallel/bucket_assignment.h>
#include <apex/parallel/model_sync.h>

#include "reducer/parameter_owner.h"
#include "torch_version.h"

namespace apex::parallel::detail {

using AccumulatorPtr = NodePtr;

/// Of a parameter that may be frozen and made in inference mode, where changes are not counted.
inline uint32_t version_of(const at::Tensor& variable) {
  return variable.is_inference() ? 0 : static_cast<uint32_t>(variable._version());
}

struct Parameter {
  std::string name;
  at::Tensor variable;

  // What the hooks were made for; another value means that they have to be made again.
  bool trainable = false;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::Device(at::kCPU);
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  AccumulatorPtr accumulator;
  uintptr_t hook = 0;

  /// Of several reducers that know it; see Note [One parameter, one reducer].
  std::shared_ptr<ParameterOwner> owner;

  bool touched = false;          ///< got a gradient since the last synchronized backward
  uint32_t touched_version = 0;  ///< of the parameter, when it got the last of these
  uint32_t seen_version = 0;     ///< of the parameter, when the last synchronized backward began

  // Without averaging, under join(), and with gradient_statistics: the gradient as the last
  // synchronized backward left it.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> reduced{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  uint32_t reduced_version = 0;

  /// .grad is what the last synchronized backward left, which was remembered.
  bool holds_reduced() const {
    const at::Tensor& grad = variable.grad();
    const auto last = reduced.lock();
    return grad.defined() && last && last.get() == grad.unsafeGetTensorImpl() &&
           grad._version() == reduced_version;
  }

  /// What accumulates now is not averaged yet: the next synchronized backward takes it along.
  void touch() {
    touched = true;
    touched_version = version_of(variable);
  }
};

/// Outlives plans and backwards. Thread safe in retire(), own_all() and owns() only.
class ParameterTable {
 public:
  using MakeHook = std::function<std::unique_ptr<torch::autograd::FunctionPostHook>(size_t index)>;

  /// @param self  tells the reducer apart from others that know the same parameters.
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

  /// @throws InvalidArgument, naming `rank`, for a trainable one that is no leaf or whose dtype
  /// cannot be averaged.
  void check_trainable(int rank) const;

  /// Notes what each parameter is now, and hooks those that are trainable and not hooked yet. One
  /// that was frozen stays hooked: a graph from before may still give it a gradient.
  void hook(int rank, const MakeHook& make_hook);
  void unhook();
  bool ever_trainable() const { return ever_trainable_; }

  /// Whether hooks have to be made again.
  bool changed() const;
  /// Fingerprint of dtypes and shapes, which decide on the sizes of messages.
  int64_t kinds() const;
  /// Whether dtypes, devices, shapes and strides are still the same; and which are trainable.
  bool same_kind() const;
  bool same_set() const;

  void own_all();
  bool owns(const Parameter& parameter) const;
  bool owns_any() const;
  /// By index: trainable now, and this reducer's.
  bool trains(size_t index) const {
    return parameters_[index].variable.requires_grad() && owns(parameters_[index]);
  }
  std::vector<bool> trained() const;
  /// The reducer is gone; only graphs of its outputs refer to it. Others may take its parameters.
  void retire();
  bool retired() const { return retired_.load(); }

  /// Versions are compared with those of now from here on.
  void forget_versions();

 private:
  std::vector<NamedTensor> named_;
  std::vector<Parameter> parameters_;
  const void* const self_;
  bool ever_trainable_ = false;
  std::atomic<bool> retired_{false};
};

}  // namespace apex::parallel::detail
