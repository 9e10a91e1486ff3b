// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/registry.h"

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include <torch/csrc/autograd/graph_task.h>

#include "reducer/parameter_owner.h"
#include "reducer/reducer_core.h"

namespace apex::parallel::detail {

namespace {

struct Registry {
  std::mutex mutex;  ///< guards states
  // A state that is being destroyed cannot be locked any more, but has to be found.
  std::vector<std::pair<const ReducerCore*, std::weak_ptr<ReducerCore>>> states;
};

// Never destroyed: reducers may outlive static objects.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

}  // namespace

void add_reducer(const std::shared_ptr<ReducerCore>& state) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().states.emplace_back(state.get(), state);
}

void drop_reducer(const ReducerCore* state) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  auto& states = registry().states;
  states.erase(std::remove_if(states.begin(), states.end(),
                              [&](const auto& entry) { return entry.first == state; }),
               states.end());
}

std::vector<std::shared_ptr<ReducerCore>> all_reducers() {
  std::vector<std::shared_ptr<ReducerCore>> alive;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& entry : registry().states) {
    if (auto state = entry.second.lock()) alive.push_back(std::move(state));
  }
  return alive;
}

std::vector<std::shared_ptr<ReducerCore>> owners_of(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> owners;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.defined()) owners.insert(owner_of(parameter)->load());
  }
  std::vector<std::shared_ptr<ReducerCore>> found = all_reducers();
  found.erase(std::remove_if(found.begin(), found.end(),
                             [&](const auto& state) { return owners.count(state.get()) == 0; }),
              found.end());
  return found;
}

void enter_backward(ReducerCore& reached) {
  const auto* only = torch::autograd::get_current_graph_task_exec_info();
  if (only != nullptr && !only->empty()) return;  // see Note [The end of a backward]
  const int task = torch::autograd::get_current_graph_task_id();
  if (reached.has_entered(task)) return;
  const auto reducers = all_reducers();
  if (reducers.size() == 1) {
    reached.own_parameters();
    reached.output_reached(task);
    return;
  }
  const auto& nodes = *torch::autograd::get_current_graph_task_nodes_in_graph();
  std::vector<std::shared_ptr<ReducerCore>> in_graph;
  for (const auto& state : reducers) {
    if (state->has_outputs_in(nodes) || state.get() == &reached) in_graph.push_back(state);
  }
  for (const auto& state : in_graph) state->own_parameters();
  for (const auto& state : in_graph) state->output_reached(task);
  for (const auto& state : in_graph) state->accompany(in_graph);
}

}  // namespace apex::parallel::detail
