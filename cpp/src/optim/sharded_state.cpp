// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/sharded_optimizer.h>

#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/serialize/archive.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "optim/shared_parameters.h"

namespace apex::parallel {

// Note [State by name]
//
// Each libtorch optimizer has a different type of state, which writes its values to an archive, by
// name, and reads them from one. So this code splits and joins the state of a parameter without
// knowing its type: a tensor with as many elements as the piece is the piece's part of the
// parameter's state, and everything else, such as a number of steps, is the same for all pieces.

namespace {

using State = torch::optim::OptimizerParamState;
using Values = std::map<std::string, c10::IValue>;

torch::serialize::InputArchive read_back(torch::serialize::OutputArchive& archive) {
  std::stringstream bytes;
  archive.save_to(bytes);
  torch::serialize::InputArchive result;
  result.load_from(bytes);
  return result;
}

Values values_in(torch::serialize::InputArchive& archive) {
  Values values;
  for (const std::string& name : archive.keys()) archive.read(name, values[name]);
  return values;
}

Values values_of(const State& state) {
  torch::serialize::OutputArchive archive;
  state.serialize(archive);
  torch::serialize::InputArchive written = read_back(archive);
  return values_in(written);
}

std::unique_ptr<State> state_with(const Values& values, const State& prototype) {
  torch::serialize::OutputArchive archive;
  for (const auto& [name, value] : values) archive.write(name, value);
  torch::serialize::InputArchive written = read_back(archive);
  std::unique_ptr<State> state = prototype.clone();
  state->serialize(written);
  return state;
}

/// A new tensor like `value` in the layout of `parameter`, and a flat view of its memory.
std::pair<at::Tensor, at::Tensor> in_layout_of(const at::Tensor& parameter,
                                               const at::Tensor& value) {
  const at::Tensor whole =
      at::empty_strided(parameter.sizes(), parameter.strides(), value.options());
  return {whole, whole.as_strided({parameter.numel()}, {1})};
}

/// Adds the values of a piece to those of its parameter.
void join(Values& all, const Values& of_piece, const ParameterPiece& piece,
          const at::Tensor& parameter) {
  for (const auto& [name, value] : of_piece) {
    const bool cut = !is_whole(piece, parameter) && value.isTensor() &&
                     value.toTensor().defined() && value.toTensor().dim() > 0 &&
                     value.toTensor().numel() == piece.end - piece.begin;
    if (!cut) {
      all[name] = value;
      continue;
    }
    const at::Tensor& part = value.toTensor();
    if (all.count(name) == 0) all[name] = in_layout_of(parameter, part).first;
    all[name]
        .toTensor()
        .as_strided({parameter.numel()}, {1})
        .narrow(0, piece.begin, part.numel())
        .copy_(part);
  }
}

Values cut(const Values& all, const ParameterPiece& piece, const NamedTensor& parameter) {
  if (is_whole(piece, parameter.tensor)) return all;
  Values values;
  for (const auto& [name, value] : all) {
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().dim() == 0) {
      values[name] = value;
      continue;
    }
    if (value.toTensor().sizes() != parameter.tensor.sizes()) {
      throw InvalidArgument("the optimizer state '" + name + "' of parameter '" + parameter.name +
                            "' does not have the shape of the parameter, which is split");
    }
    const auto [whole, flat] = in_layout_of(parameter.tensor, value.toTensor());
    whole.copy_(value.toTensor());
    values[name] = flat.narrow(0, piece.begin, piece.end - piece.begin).clone();
  }
  return values;
}

/// The bytes of `message` of rank `from`, on every rank.
std::string broadcast_text(const std::string& message, int64_t from, c10d::ProcessGroup& group,
                           at::Device device) {
  const std::string what = "state of a ShardedOptimizer";
  const auto send = [&](const at::Tensor& tensor) {
    const at::Tensor there = tensor.to(device);
    run_collective(what, group, [&] { return issue_broadcast(what, group, there, from); });
    return there.to(at::kCPU);
  };
  const bool sends = group.getRank() == from;
  const at::Tensor size = at::full({1}, static_cast<int64_t>(message.size()), at::kLong);
  const int64_t bytes = send(size).item<int64_t>();
  at::Tensor text = at::empty({bytes}, at::kByte);
  if (sends) std::memcpy(text.mutable_data_ptr(), message.data(), message.size());
  text = send(text);
  return std::string(static_cast<const char*>(text.const_data_ptr()), static_cast<size_t>(bytes));
}

}  // namespace

namespace detail {

void gather_optimizer_state(const ParameterShards& shards, torch::optim::Optimizer& mine,
                            torch::optim::Optimizer* whole, const State& prototype) {
  shards.refuse_failed();
  const at::NoGradGuard no_grad;
  c10d::ProcessGroup& group = *shards.group();
  const auto& parameters = shards.parameters();
  const auto rank = static_cast<size_t>(group.getRank());
  torch::serialize::OutputArchive sent;
  for (size_t i = 0; i < shards.tensors().size(); ++i) {
    const auto found = mine.state().find(shards.tensors()[i].unsafeGetTensorImpl());
    if (found == mine.state().end()) continue;
    torch::serialize::OutputArchive of_piece(sent.compilation_unit());
    found->second->serialize(of_piece);
    sent.write(std::to_string(i), of_piece);
  }
  std::ostringstream message;
  sent.save_to(message);
  const at::Device device = parameters.empty() ? at::kCPU : parameters.front().tensor.device();
  std::map<int64_t, Values> by_parameter;
  for (size_t r = 0; r < shards.shards().size(); ++r) {
    const bool own = r == rank;
    std::istringstream bytes(broadcast_text(own ? message.str() : std::string(),
                                            static_cast<int64_t>(r), group, device));
    if (whole == nullptr) continue;
    torch::serialize::InputArchive received;
    received.load_from(bytes);
    for (const std::string& key : received.keys()) {
      const ParameterPiece& piece = shards.shards()[r][std::stoul(key)];
      torch::serialize::InputArchive of_piece;
      received.read(key, of_piece);
      join(by_parameter[piece.parameter], values_in(of_piece), piece,
           parameters[static_cast<size_t>(piece.parameter)].tensor);
    }
  }
  if (whole == nullptr) return;
  whole->state().clear();
  for (const auto& [i, values] : by_parameter) {
    whole->state()[parameters[static_cast<size_t>(i)].tensor.unsafeGetTensorImpl()] =
        state_with(values, prototype);
  }
}

void take_optimizer_state(const ParameterShards& shards, torch::optim::Optimizer& mine,
                          const torch::optim::Optimizer& whole) {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<void*, std::unique_ptr<State>>> taken;
  const auto& own = shards.shards()[static_cast<size_t>(shards.group()->getRank())];
  for (size_t i = 0; i < own.size(); ++i) {
    const NamedTensor& parameter = shards.parameters()[static_cast<size_t>(own[i].parameter)];
    const auto found = whole.state().find(parameter.tensor.unsafeGetTensorImpl());
    if (found == whole.state().end()) continue;
    taken.emplace_back(
        shards.tensors()[i].unsafeGetTensorImpl(),
        state_with(cut(values_of(*found->second), own[i], parameter), *found->second));
  }
  mine.state().clear();
  for (auto& [key, state] : taken) mine.state()[key] = std::move(state);
}

}  // namespace detail

}  // namespace apex::parallel
