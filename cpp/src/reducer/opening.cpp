// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/opening.h"

#include <algorithm>
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
  std::vector<at::Tensor> norms;
  if (!captured) norms = max_norms_of(values);
  for (at::Tensor& norm : norms) norm = norm.to(norms.front().device());
  const at::Tensor largest = captured ? at::Tensor() : at::stack(norms).cpu();
  for (size_t i = 0; i < kept.size(); ++i) {
    if (captured || largest.const_data_ptr<double>()[i] == 0) gradients[kept[i]].stale = false;
  }
}

}  // namespace

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

BackwardPass open_pass(ReducerState& state) {
  ReducerContext& context = state.context;
  ParameterTable& parameters = context.parameters;
  BackwardPass pass(parameters.size());
  bool written = false;
  bool written_locally = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters[i];
    const at::Tensor& grad = parameter.variable.grad();
    const bool owned = parameters.owns(parameter);
    if (owned) {
      const uint32_t version = version_of(parameter.variable);
      written = written || version != parameter.seen_version;
      written_locally =
          written_locally || (parameter.touched && version != parameter.touched_version);
      parameter.seen_version = version;
    }
    pass.kept[i] = grad.defined();
    pass.accumulated = pass.accumulated || parameter.touched;
    // Gradients that accumulated without synchronization are part of this reduction.
    pass.used[i] = parameter.touched && owned && grad.defined();
    if (!context.leaves_sums() && !context.join.active) continue;
    pass.gradients[i].stale = parameter.holds_reduced();
  }
  if (context.leaves_sums() || context.join.active) find_cleared(parameters, pass.gradients);
  state.reporter.backward_began();
  state.reporter.tracker.backward_began(written, written_locally);
  return pass;
}

}  // namespace apex::parallel::detail
