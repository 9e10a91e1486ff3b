// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/backward_session.h"

#include <algorithm>
#include <exception>
#include <unordered_map>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "reducer/reducer_core.h"

namespace apex::parallel::detail {

namespace {

using torch::autograd::variable_list;

struct Registry {
  std::mutex mutex;  ///< guards the rest
  int64_t made = 0;
  std::vector<std::weak_ptr<ReducerCore>> reducers;
  std::unordered_map<int, std::weak_ptr<BackwardSession>> sessions;  ///< by graph task
};

// Never destroyed: reducers may outlive static objects.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

/// Compiled autograd traces hooks. The hooks of the reducer would reduce gradients during the
/// trace.
constexpr const char* kNoCompiledAutograd =
    "apex's gradient reducer cannot be traced by compiled autograd: run backward() without "
    "torch._dynamo.config.compiled_autograd (torch.compile of the model itself is fine)";

class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(std::shared_ptr<ReducerCore> core, std::shared_ptr<const void> output)
      : core_(std::move(core)), output_(std::move(output)) {}

  variable_list operator()(const variable_list& grads) override {
    BackwardSession::reach(core_);
    return grads;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    throw Error(kNoCompiledAutograd);
  }

 private:
  std::shared_ptr<ReducerCore> core_;
  std::shared_ptr<const void> output_;  ///< see WatchedOutputs
};

}  // namespace

void BackwardSession::add(const std::shared_ptr<ReducerCore>& reducer) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  auto& reducers = registry().reducers;
  reducers.erase(std::remove_if(reducers.begin(), reducers.end(),
                                [](const auto& one) { return one.expired(); }),
                 reducers.end());
  reducer->number_ = ++registry().made;
  reducers.emplace_back(reducer);
}

BackwardSession::Reducers BackwardSession::all() {
  Reducers alive;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& entry : registry().reducers) {
    if (auto one = entry.lock()) alive.push_back(std::move(one));
  }
  return alive;
}

std::shared_ptr<BackwardSession> BackwardSession::current(bool by_output) {
  const int task = torch::autograd::get_current_graph_task_id();
  std::shared_ptr<BackwardSession> session;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    auto& sessions = registry().sessions;
    for (auto one = sessions.begin(); one != sessions.end();)
      one = one->second.expired() ? sessions.erase(one) : std::next(one);
    session = sessions[task].lock();
    if (session) return session;
    session = std::make_shared<BackwardSession>();
    session->by_output_ = by_output;
    sessions[task] = session;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([session] { session->end(); });
  return session;
}

/// The reducers for which the backward begins now. At the first output these are all reducers of
/// the graph.
BackwardSession::Reducers BackwardSession::newly_reached(
    const std::shared_ptr<ReducerCore>& reached) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reached_.count(reached.get()) != 0) return {};
  Reducers reducers = all();
  // This call is slow, and only needed with several reducers.
  const auto* const nodes =
      reducers.size() > 1 ? torch::autograd::get_current_graph_task_nodes_in_graph() : nullptr;
  const auto stays_out = [&](const auto& one) {
    const bool comes = one == reached || one->has_outputs_in(*nodes);
    return !comes || !reached_.insert(one.get()).second;
  };
  reducers.erase(std::remove_if(reducers.begin(), reducers.end(), stays_out), reducers.end());
  return reducers;
}

void BackwardSession::reach(const std::shared_ptr<ReducerCore>& reached) {
  const auto session = current(/*by_output=*/true);
  const Reducers reducers = session->newly_reached(reached);
  for (const auto& one : reducers) one->own_parameters();
  const auto* only = torch::autograd::get_current_graph_task_exec_info();
  if (only != nullptr && !only->empty()) return;  // see Note [The end of a backward]
  for (const auto& one : reducers) one->begin(session);
}

void BackwardSession::join(const std::shared_ptr<ReducerCore>& one) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto earlier = [](const auto& left, const auto& right) {
    return left->number_ < right->number_;
  };
  participants_.insert(std::upper_bound(participants_.begin(), participants_.end(), one, earlier),
                       one);
  several_ = participants_.size() > 1;
}

void BackwardSession::if_abandoned(std::function<void()> undo) {
  const std::lock_guard<std::mutex> lock(mutex_);
  undo_.push_back(std::move(undo));
}

void BackwardSession::end() {
  Reducers reducers;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // An inner graph task ends while a node of the outer one is evaluated.
    if (!by_output_ && !participants_.empty() && torch::autograd::get_current_node()) {
      throw Error(
          "apex: a backward that reaches a wrapper's parameters in a reentrant checkpoint before "
          "an output is not supported: call the wrapper, not its module, return from its forward "
          "what the loss uses, or pass use_reentrant=False");
    }
    reducers = std::exchange(participants_, {});
    undo_.clear();
  }
  std::exception_ptr error;
  const auto keep_error = [&](const auto& body) {
    try {
      body();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  };
  for (const auto& one : reducers) keep_error([&] { one->send(this); });
  for (const auto& waiting : reducers) {
    const auto look_at_all = [&] {
      for (const auto& one : reducers) {
        const std::string apart = one->out_of_step();
        if (apart.empty()) continue;
        waiting->context().fail();  // it is unknown whether the other ranks reach this reducer
        throw RankMismatch(apart);
      }
    };
    const bool alone = reducers.size() == 1;
    keep_error([&] { waiting->complete(this, alone ? std::function<void()>() : look_at_all); });
  }
  if (error) std::rethrow_exception(error);
}

BackwardSession::~BackwardSession() {
  for (const auto& undo : undo_) undo();
  for (const auto& one : participants_) one->abandon(this);
}

std::unique_ptr<torch::autograd::FunctionPostHook> make_gradient_hook(
    std::weak_ptr<ReducerCore> reducer, size_t index) {
  return std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [reducer = std::move(reducer), index](const variable_list& outputs, const variable_list&) {
        if (const auto core = reducer.lock()) core->gradient_ready(index);
        return outputs;
      },
      [](torch::dynamo::autograd::CompiledNodeArgs&) { throw Error(kNoCompiledAutograd); });
}

void WatchedOutputs::watch(torch::autograd::Node& node, std::shared_ptr<ReducerCore> core) {
  const auto output = std::make_shared<Output>(&node);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // If the user holds many outputs, they are not scanned in every forward.
    if (outputs_.size() >= most_) {
      outputs_.erase(std::remove_if(outputs_.begin(), outputs_.end(),
                                    [](const auto& held) { return held.expired(); }),
                     outputs_.end());
      most_ = std::max<size_t>(16, 2 * outputs_.size());
    }
    outputs_.push_back(output);
  }
  node.add_pre_hook(std::make_unique<OutputHook>(std::move(core), output));
}

bool WatchedOutputs::lie_in(const std::unordered_set<torch::autograd::Node*>& nodes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(outputs_.begin(), outputs_.end(), [&](const auto& held) {
    const auto output = held.lock();
    return output && nodes.count(*output) != 0;
  });
}

}  // namespace apex::parallel::detail
