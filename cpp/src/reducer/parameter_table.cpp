// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/parameter_table.h"

#include <algorithm>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include <apex/error.h>

#include "fingerprint.h"
#include "tensor_memory.h"

namespace apex::parallel::detail {

namespace {

struct Owners {
  std::mutex mutex;  ///< guards the rest
  std::unordered_map<const void*, std::weak_ptr<ParameterOwner>> by_parameter;
};

// Never destroyed: reducers may outlive static objects.
Owners& owners() {
  static auto* const instance = new Owners;
  return *instance;
}

/// The gradient accumulator of a parameter. `.data` of another shape leaves the accumulator in
/// place, and autograd then refuses gradients of the new shape for as long as a graph or another
/// reducer keeps that accumulator alive. So an accumulator of another shape is replaced.
AccumulatorPtr accumulator_of(const at::Tensor& variable) {
  AccumulatorPtr accumulator = torch::autograd::impl::grad_accumulator(variable);
  if (accumulator->input_metadata(0).is_same_shape(variable)) return accumulator;
  torch::autograd::impl::get_autograd_meta(variable)->grad_accumulator_.reset();
  return torch::autograd::impl::grad_accumulator(variable);
}

void check(const NamedTensor& parameter, int rank) {
  const at::Tensor& tensor = parameter.tensor;
  const at::ScalarType dtype = tensor.scalar_type();
  const bool can_be_averaged = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
                               dtype == at::kBFloat16 || dtype == at::kComplexFloat ||
                               dtype == at::kComplexDouble;
  std::ostringstream out;
  out << "rank " << rank << ": parameter '" << parameter.name << "' ";
  if (!can_be_averaged) {
    out << "requires a gradient and has dtype " << dtype
        << ", which cannot be averaged over ranks: use float32, float64, float16, bfloat16, "
           "complex64 or complex128, or freeze it with requires_grad_(False)";
  } else if (!tensor.is_leaf()) {
    out << "is the result of an operation, not a leaf, so it never gets a .grad: pass the tensor "
           "that it was computed from";
  } else if (const std::string why = why_not_sendable(tensor); !why.empty()) {
    out << "cannot be synchronized, since " << why
        << ": replace it before the model is wrapped, or leave it out";
  } else if (!has_memory(tensor)) {
    out << "is a tensor subclass without memory of its own, whose gradient cannot be averaged: "
           "make its inner tensors parameters, or freeze it with requires_grad_(False)";
  } else if (const auto gradients = other_grad_dtype(tensor)) {
    out << "has dtype " << dtype << " and its gradients " << *gradients
        << " (grad_dtype), but buckets have the dtype of the parameters: set its grad_dtype to "
        << dtype << ", or keep the parameter in " << *gradients;
  } else {
    return;
  }
  throw InvalidArgument(out.str());
}

}  // namespace

std::shared_ptr<ParameterOwner> owner_of(const at::Tensor& parameter) {
  const void* const key = parameter.unsafeGetTensorImpl();
  const std::lock_guard<std::mutex> lock(owners().mutex);
  std::weak_ptr<ParameterOwner>& entry = owners().by_parameter[key];
  if (auto owner = entry.lock()) return owner;
  const std::shared_ptr<ParameterOwner> owner(
      new ParameterOwner(nullptr), [key](ParameterOwner* last) {
        delete last;
        const std::lock_guard<std::mutex> inner(owners().mutex);
        const auto found = owners().by_parameter.find(key);
        if (found != owners().by_parameter.end() && found->second.expired())
          owners().by_parameter.erase(found);
      });
  entry = owner;
  return owner;
}

ParameterTable::ParameterTable(std::vector<NamedTensor> parameters, const void* self)
    : self_(self) {
  std::unordered_set<const void*> seen;
  for (NamedTensor& parameter : parameters) {
    if (!parameter.tensor.defined())
      throw InvalidArgument("parameter '" + parameter.name + "' is undefined");
    if (!seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
    named_.push_back(std::move(parameter));
  }
  for (const NamedTensor& parameter : named_) {
    Parameter& entry = parameters_.emplace_back(parameter.name, parameter.tensor);
    if (entry.variable.is_leaf() && entry.variable.grad().defined()) entry.touch();
  }
}

ParameterTable::~ParameterTable() {
  retire();
  unhook();
}

void ParameterTable::check_trainable(int rank) const {
  for (const NamedTensor& parameter : named_) {
    if (parameter.tensor.requires_grad()) check(parameter, rank);
  }
}

bool ParameterTable::hook(int rank, const MakeHook& make_hook) {
  bool grew = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.trainable = parameter.variable.requires_grad();
    parameter.kind = ParameterKind(parameter.variable);
    if (!parameter.trainable) continue;
    ever_trainable_ = true;
    check(named_[i], rank);
    const AccumulatorPtr accumulator = accumulator_of(parameter.variable);
    if (accumulator == parameter.accumulator) continue;
    if (parameter.accumulator) parameter.accumulator->del_post_hook(parameter.hook);
    grew = grew || !parameter.accumulator;
    parameter.accumulator = accumulator;
    parameter.hook = parameter.accumulator->add_post_hook(make_hook(i));
  }
  return grew;
}

void ParameterTable::unhook() {
  for (Parameter& parameter : parameters_) {
    if (parameter.accumulator) parameter.accumulator->del_post_hook(parameter.hook);
    parameter.accumulator = {};
    parameter.hook = 0;
  }
}

bool ParameterTable::changed() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
    // Module.double() and similar calls replace the accumulator and its hook, even if the dtype is
    // restored afterwards.
    return parameter.variable.requires_grad() != parameter.trainable ||
           !parameter.kind.is_of(parameter.variable) ||
           (parameter.trainable && torch::autograd::impl::try_get_grad_accumulator(
                                       parameter.variable) != parameter.accumulator);
  });
}

int64_t ParameterTable::kinds() const {
  Fingerprint all;
  for (const Parameter& parameter : parameters_) {
    const ParameterKind& kind = parameter.kind;
    all.add(&kind.dtype, sizeof(kind.dtype));
    all.add(kind.sizes.data(), kind.sizes.size() * sizeof(int64_t));
  }
  return all.value();
}

bool ParameterTable::same_kind() const {
  return std::all_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
    return parameter.kind.is_of(parameter.variable);
  });
}

void ParameterTable::own_all() {
  for (Parameter& parameter : parameters_) parameter.owner->store(self_, std::memory_order_relaxed);
}

bool ParameterTable::owns(const Parameter& parameter) const {
  const void* owner = parameter.owner->load(std::memory_order_relaxed);
  // This reducer is retired, and no other one has taken the parameter. Graphs of its outputs are
  // still synchronized.
  return owner == self_ || (owner == nullptr && retired_.load(std::memory_order_relaxed));
}

bool ParameterTable::owns_any() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [&](const Parameter& one) { return owns(one); });
}

std::vector<bool> ParameterTable::trained() const {
  std::vector<bool> result;
  for (const Parameter& one : parameters_)
    result.push_back(one.variable.requires_grad() && owns(one));
  return result;
}

void ParameterTable::retire() {
  retired_.store(true);
  for (Parameter& parameter : parameters_) {
    const void* mine = self_;
    parameter.owner->compare_exchange_strong(mine, nullptr);
  }
}

void ParameterTable::own_orphans(const Parameter& parameter) {
  if (parameter.owner->load(std::memory_order_relaxed) != nullptr || retired_.load()) return;
  for (Parameter& one : parameters_) {
    const void* none = nullptr;
    one.owner->compare_exchange_strong(none, self_);
  }
}

}  // namespace apex::parallel::detail
