// SPDX-License-Identifier: BSD-3-Clause
#include "step/backward_session.h"

#include <algorithm>
#include <exception>
#include <unordered_map>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace apex::parallel::detail {

namespace {

struct Registry {
  std::mutex mutex;  ///< guards the rest
  int64_t made = 0;
  // The raw pointer finds a reducer during its destruction, when its weak_ptr cannot be locked.
  std::vector<std::pair<const BackwardParticipant*, std::weak_ptr<BackwardParticipant>>> reducers;
  std::unordered_map<int, std::weak_ptr<BackwardSession>> sessions;  ///< by graph task
};

// Never destroyed: reducers may outlive static objects.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

}  // namespace

void BackwardSession::add(const std::shared_ptr<BackwardParticipant>& participant) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  participant->number_ = ++registry().made;
  registry().reducers.emplace_back(participant.get(), participant);
}

void BackwardSession::drop(const BackwardParticipant* participant) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  auto& reducers = registry().reducers;
  reducers.erase(std::remove_if(reducers.begin(), reducers.end(),
                                [&](const auto& entry) { return entry.first == participant; }),
                 reducers.end());
}

std::vector<std::shared_ptr<BackwardParticipant>> BackwardSession::all() {
  Participants alive;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& entry : registry().reducers) {
    if (auto one = entry.second.lock()) alive.push_back(std::move(one));
  }
  return alive;
}

std::shared_ptr<BackwardSession> BackwardSession::current() {
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
    sessions[task] = session;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([session] { session->end(); });
  return session;
}

/// The reducers for which the backward begins now. At the first output these are all reducers of
/// the graph.
BackwardSession::Participants BackwardSession::newly_reached(
    const std::shared_ptr<BackwardParticipant>& reached) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reached_.count(reached.get()) != 0) return {};
  Participants reducers = all();
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

void BackwardSession::reach(const std::shared_ptr<BackwardParticipant>& reached) {
  const auto* only = torch::autograd::get_current_graph_task_exec_info();
  if (only != nullptr && !only->empty()) return;  // see Note [The end of a backward]
  const auto session = current();
  const Participants reducers = session->newly_reached(reached);
  for (const auto& one : reducers) one->own_parameters();
  for (const auto& one : reducers) one->begin(session);
}

void BackwardSession::join(const std::shared_ptr<BackwardParticipant>& one) {
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
  Participants reducers;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
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
  const auto look_at_all = [&] {
    for (const auto& one : reducers) {
      const std::string apart = one->out_of_step();
      if (!apart.empty()) throw OutOfStepElsewhere(apart);
    }
  };
  const std::function<void()> meanwhile =
      reducers.size() > 1 ? look_at_all : std::function<void()>();
  for (const auto& one : reducers) keep_error([&] { one->complete(this, meanwhile); });
  if (error) std::rethrow_exception(error);
}

BackwardSession::~BackwardSession() {
  for (const auto& undo : undo_) undo();
  for (const auto& one : participants_) one->abandon(this);
}

}  // namespace apex::parallel::detail
