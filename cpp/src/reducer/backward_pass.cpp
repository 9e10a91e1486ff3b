// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/backward_pass.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "distributed/backends.h"
#include "reducer/multi_tensor.h"
#include "tensor_memory.h"

namespace apex::parallel::detail {

namespace {

// Note [Gradients cleared in place]
//
// Some ways to clear gradients in place do not change the tensors' versions: through .data, and on
// a GPU by one operator for all of them, as optimizers with fused=True or foreach=True do. So
// gradients that seem to be kept from the last reduction are compared with zero. On a device the
// host waits for the comparison, but only if such a gradient exists and would be summed again.
// While a graph is captured, the host cannot wait, and the gradients count as cleared.

/// Clears the mark of gradients that are zero.
void find_cleared(const ParameterTable& parameters, std::vector<GradientState>& gradients) {
  std::vector<size_t> kept;
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!gradients[i].stale) continue;
    at::Tensor grad = parameters[i].variable.grad().detach();
    grad = grad.layout() == at::kSparse ? grad._values() : in_memory(grad);
    if (grad.numel() == 0) continue;
    kept.push_back(i);
    values.push_back(grad);
  }
  if (values.empty()) return;
  const bool on_gpu =
      std::any_of(values.begin(), values.end(), [](auto& one) { return one.is_cuda(); });
  const bool captured = on_gpu && distributed::is_capturing();
  const at::Tensor largest = captured ? at::Tensor() : max_norms_of(values).cpu();
  for (size_t i = 0; i < kept.size(); ++i) {
    if (captured || largest.const_data_ptr<double>()[i] == 0) gradients[kept[i]].stale = false;
  }
}

}  // namespace

void FiniteCheck::look(const BucketMessage& message) {
  const at::Tensor all = message.gradients_of(message.tensor());
  // A sum of finite values may overflow, so it only tells where to look.
  if (all.is_cpu() && at::isfinite(all.sum()).item<bool>()) return;
  const std::vector<at::Tensor> views = message.views_of(all);
  std::vector<int64_t> parameters;
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < views.size(); ++i) {
    const BucketMessage::Slot& slot = message.slots()[i];
    if (!slot.used || views[i].numel() == 0) continue;
    parameters.push_back(slot.parameter);
    values.push_back(views[i]);
  }
  if (!values.empty()) largest_.emplace_back(std::move(parameters), max_norms_of(values));
}

void FiniteCheck::look(int64_t parameter, const at::Tensor& gradient) {
  at::Tensor values = gradient.detach();
  if (values.layout() == at::kSparse) values = values._values();
  if (values.numel() > 0)
    largest_.emplace_back(std::vector<int64_t>{parameter}, max_norms_of({values}));
}

int64_t FiniteCheck::first() const {
  int64_t first = -1;
  for (const auto& [parameters, largest] : largest_) {
    const at::Tensor read = largest.cpu();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const bool is_finite = std::isfinite(read.const_data_ptr<double>()[i]);
      if (!is_finite && (first < 0 || parameters[i] < first)) first = parameters[i];
    }
  }
  return first;
}

void refuse_failed(const ReducerContext& context) {
  if (context.phase == Phase::kReleased) {
    throw Error(
        "backward ran after the reducer released its process groups (release(), or the "
        "interpreter's exit), so gradients would not be averaged");
  }
  refuse_failed_group("backward", *context.members.parent);
  if (context.phase == Phase::kFailed) {
    throw CommunicationError(
        context.me() +
        "a collective, or the communication hook of some ranks, failed in an earlier backward, so "
        "the ranks' messages no longer match: restart with a new process group and a new wrapper");
  }
}

BackwardPass open_pass(ReducerContext& context) {
  ParameterTable& parameters = context.parameters;
  BackwardPass pass(parameters.size());
  const bool finds_stale = context.leaves_sums() || context.join.active;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters[i];
    const at::Tensor& grad = parameter.variable.grad();
    const bool owned = parameters.owns(parameter);
    if (owned) {
      const uint32_t version = version_of(parameter.variable);
      pass.start.written = pass.start.written || version != parameter.seen_version;
      pass.start.written_locally =
          pass.start.written_locally || (parameter.touched && version != parameter.touched_version);
      parameter.seen_version = version;
    }
    pass.start.kept[i] = grad.defined();
    pass.start.accumulated = pass.start.accumulated || parameter.touched;
    // Gradients that accumulated without synchronization are part of this reduction.
    pass.used[i] = parameter.touched && owned && grad.defined();
    if (finds_stale) pass.gradients[i].stale = parameter.holds_reduced();
  }
  if (finds_stale) find_cleared(parameters, pass.gradients);
  return pass;
}

}  // namespace apex::parallel::detail
