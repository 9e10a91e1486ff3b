// SPDX-License-Identifier: BSD-3-Clause
#include <benchmark/benchmark.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <unistd.h>

#include <apex/distributed/process_group.h>
#include <apex/parallel/reducer.h>

// What hooks, launches and the end of a backward cost: the model is one autograd node that hands
// out gradients, and the group has one rank.

namespace {

using apex::parallel::NamedTensor;
using apex::parallel::Reducer;
using apex::parallel::ReducerOptions;

const std::vector<at::Tensor>* given_gradients = nullptr;

/// A scalar whose gradient with respect to each parameter is a given tensor.
struct HandOut : torch::autograd::Function<HandOut> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::TensorList parameters) {
    return at::zeros({}, parameters[0].options().requires_grad(false));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return *given_gradients;
  }
};

c10::intrusive_ptr<c10d::ProcessGroup> group_of_one() {
  if (!apex::distributed::is_initialized()) {
    const auto path =
        std::filesystem::temp_directory_path() / ("apex_benchmark_" + std::to_string(::getpid()));
    apex::distributed::ProcessGroupOptions options;
    options.init_method("file://" + path.string());
    options.rank(0);
    options.world_size(1);
    apex::distributed::init_process_group("gloo", options);
    std::filesystem::remove(path);
  }
  return apex::distributed::get_default_group();
}

enum Wrapper : int64_t { kNone, kReducer, kReducerViews };

/// Arguments: number of parameters, elements of each, Wrapper.
void Backward(benchmark::State& state) {
  const int64_t count = state.range(0);
  const int64_t numel = state.range(1);
  std::vector<NamedTensor> named;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  for (int64_t i = 0; i < count; ++i) {
    parameters.push_back(at::zeros({numel}).requires_grad_());
    gradients.push_back(at::ones({numel}));
    named.push_back({"p" + std::to_string(i), parameters.back()});
  }
  given_gradients = &gradients;
  std::unique_ptr<Reducer> reducer;
  if (state.range(2) != kNone) {
    ReducerOptions options;
    options.gradient_as_bucket_view = state.range(2) == kReducerViews;
    reducer = std::make_unique<Reducer>(named, std::vector{group_of_one()}, options);
  }
  auto step = [&] {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor();
    if (reducer) reducer->prepare_for_forward();
    const at::Tensor loss = HandOut::apply(at::TensorList(parameters));
    if (reducer) reducer->watch_outputs({loss});
    loss.backward();
  };
  step();  // records the order
  for (auto _ : state) step();
  state.SetItemsProcessed(state.iterations() * count);
  if (reducer) {
    const auto statistics = reducer->statistics();
    state.counters["collectives"] =
        static_cast<double>(statistics.launched_in_backward + statistics.launched_at_end) /
        static_cast<double>(statistics.backwards);
  }
}
BENCHMARK(Backward)
    ->ArgNames({"parameters", "numel", "wrapper"})
    ->ArgsProduct({{1, 100, 1000}, {64}, {kNone, kReducer, kReducerViews}});

}  // namespace
