// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/hooks.h"

#include <utility>

#include <torch/csrc/autograd/function.h>

#include <apex/error.h>

#include "reducer/reducer_core.h"

namespace apex::parallel::detail {

namespace {

/// Compiled autograd traces hooks. The hooks of the reducer would reduce gradients during the
/// trace.
constexpr const char* kNoCompiledAutograd =
    "apex's gradient reducer cannot be traced by compiled autograd: run backward() without "
    "torch._dynamo.config.compiled_autograd (torch.compile of the model itself is fine)";

class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::weak_ptr<ReducerCore> core, size_t index)
      : core_(std::move(core)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (const auto core = core_.lock()) core->gradient_ready(index_);
    return outputs;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    throw Error(kNoCompiledAutograd);
  }

 private:
  std::weak_ptr<ReducerCore> core_;
  size_t index_;
};

class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(std::shared_ptr<ReducerCore> core, std::shared_ptr<const WatchedOutput> output)
      : core_(std::move(core)), output_(std::move(output)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    BackwardSession::reach(core_);
    return grads;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    throw Error(kNoCompiledAutograd);
  }

 private:
  std::shared_ptr<ReducerCore> core_;
  std::shared_ptr<const WatchedOutput> output_;
};

}  // namespace

std::unique_ptr<torch::autograd::FunctionPostHook> make_gradient_hook(
    std::weak_ptr<ReducerCore> core, size_t index) {
  return std::make_unique<GradientHook>(std::move(core), index);
}

std::unique_ptr<torch::autograd::FunctionPreHook> make_output_hook(
    std::shared_ptr<ReducerCore> core, std::shared_ptr<const WatchedOutput> output) {
  return std::make_unique<OutputHook>(std::move(core), std::move(output));
}

}  // namespace apex::parallel::detail
