// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/parameter_shards.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "tensor_parts.h"
#include "transport/separate_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

// Note [Before or after a step]
//
// A rank that ends while others step must not leave them with parameters of which some are new and
// some are old. Those of other ranks are written when all ranks have sent theirs. A rank's own are
// stepped where they lie; but what it has sent last lies in a buffer until the next step has been
// published, and is put back if that fails. So there are two buffers, which take turns. Nothing is
// copied for it: the copy into a buffer is what the others read. Where parameters were changed
// since they were sent, the buffer does not have them, and they are copied; not into the buffer,
// from which a rank that is late may still read. (What is changed through .data() shows in no
// version.)
//
// Nobody reads a buffer any more when it has its turn again: a rank sends step k + 1 when it has
// all of step k, and this rank begins with step k + 2 when it has had everybody's k + 1.

namespace {

/// Vectors of any processor, and cache lines, stay whole.
constexpr int64_t kAlignment = 64;
/// Of a parameter with fewer elements nothing is cut off.
constexpr int64_t kLeastToCut = 4096;

using Shards = std::vector<std::vector<ParameterPiece>>;

Shards whole_parameters(const std::vector<int64_t>& numels, const std::vector<double>& costs,
                        size_t ranks) {
  std::vector<size_t> order(numels.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t left, size_t right) { return costs[left] > costs[right]; });
  std::vector<double> load(ranks);
  Shards shards(ranks);
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += costs[i];
    shards[static_cast<size_t>(least - load.begin())].push_back(
        {static_cast<int64_t>(i), 0, numels[i]});
  }
  for (auto& shard : shards) {
    std::sort(shard.begin(), shard.end(),
              [](const ParameterPiece& left, const ParameterPiece& right) {
                return left.parameter < right.parameter;
              });
  }
  return shards;
}

Shards runs_of_elements(const std::vector<int64_t>& numels, const std::vector<double>& costs,
                        size_t ranks) {
  const double each = std::accumulate(costs.begin(), costs.end(), 0.0) / static_cast<double>(ranks);
  Shards shards(ranks);
  size_t rank = 0;
  double before = 0;  // cost of all elements so far
  for (size_t i = 0; i < numels.size(); ++i) {
    int64_t begin = 0;
    while (rank + 1 < ranks) {
      const double left = each * static_cast<double>(rank + 1) - before;
      if (left >= costs[i]) break;
      const auto elements = static_cast<double>(numels[i]) * left / costs[i];
      auto end = static_cast<int64_t>(std::llround(elements / kAlignment)) * kAlignment;
      if (numels[i] < kLeastToCut)
        end = elements * 2 < static_cast<double>(numels[i]) ? 0 : numels[i];
      end = std::clamp(end, begin, numels[i]);
      if (end > begin) shards[rank].push_back({static_cast<int64_t>(i), begin, end});
      begin = end;
      ++rank;
    }
    if (begin < numels[i] || (numels[i] == 0 && begin == 0))
      shards[rank].push_back({static_cast<int64_t>(i), begin, numels[i]});
    before += costs[i];
  }
  return shards;
}

bool is_whole(const ParameterPiece& piece, const at::Tensor& parameter) {
  return piece.begin == 0 && piece.end == parameter.numel();
}

/// All elements of a tensor without gaps, as they lie.
at::Tensor flat_memory(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

at::Tensor bytes_in(const at::Tensor& flat) {
  return (flat.is_complex() ? at::view_as_real(flat).view(-1) : flat).view(at::kByte);
}

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.numel();
  return bytes;
}

/// Views of `flat`, one behind the other, like `tensors`.
std::vector<at::Tensor> split_like(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    views.push_back(flat.narrow(0, offset, tensor.numel()));
    offset += tensor.numel();
  }
  return views;
}

/// Copies into `targets`, which autograd does not see.
void copy_all(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& sources) {
  if (!targets.empty()) at::_foreach_copy_(targets, sources);
}

}  // namespace

/// What lies on one device.
struct ParameterShards::OnDevice {
  std::vector<std::vector<at::Tensor>> memory;  ///< bytes of the pieces, by rank
  std::array<at::Tensor, 2> sent;               ///< this rank's: see Note [Before or after a step]
  at::Tensor saved;                             ///< the same, if changed since it was sent
  bool shared = false;                          ///< with the ranks of the group, all of one host
};

std::vector<std::vector<ParameterPiece>> assign_shards(const std::vector<int64_t>& numels,
                                                       std::vector<double> costs, int64_t ranks,
                                                       bool whole) {
  if (costs.empty()) costs.assign(numels.begin(), numels.end());
  if (costs.size() != numels.size()) {
    throw InvalidArgument("assign_shards: " + std::to_string(costs.size()) + " costs for " +
                          std::to_string(numels.size()) + " parameters");
  }
  for (const double cost : costs) {
    if (!(cost >= 0 && std::isfinite(cost)))
      throw InvalidArgument("assign_shards: a cost is " + std::to_string(cost) +
                            ", and has to be finite and not negative");
  }
  if (ranks < 1) throw InvalidArgument("assign_shards: there is no rank");
  return whole ? whole_parameters(numels, costs, static_cast<size_t>(ranks))
               : runs_of_elements(numels, costs, static_cast<size_t>(ranks));
}

struct ParameterShards::State {
  std::vector<NamedTensor> parameters;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  size_t rank = 0;
  Shards shards;
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> numels;  ///< of each parameter, and so on
  std::vector<at::ScalarType> dtypes;
  std::vector<at::Device> places;
  std::vector<const void*> seen;  ///< where it lay
  std::vector<uint32_t>
      versions;  ///< after the last publish(), of the parameters that are stepped here
  std::map<std::string, OnDevice> devices;
  int64_t steps = 0;  ///< published

  const std::vector<ParameterPiece>& own() const { return shards[rank]; }

  const at::Tensor& of(const ParameterPiece& piece) const {
    return parameters[static_cast<size_t>(piece.parameter)].tensor;
  }

  std::string me() const { return "rank " + std::to_string(rank) + ": "; }

  void require_usable(const NamedTensor& parameter) const {
    const at::Tensor& tensor = parameter.tensor;
    const auto refuse = [&](const std::string& why) {
      throw InvalidArgument(me() + "parameter '" + parameter.name + "' " + why);
    };
    if (!tensor.defined()) refuse("is undefined");
    if (tensor.layout() != at::kStrided || !has_memory(tensor))
      refuse(
          "is a tensor subclass, sparse, or on the meta device: its memory cannot be shared out");
    if (!tensor.is_non_overlapping_and_dense())
      refuse("has gaps in its memory: replace it by a contiguous one before the optimizer is made");
  }

  at::Tensor values(const ParameterPiece& piece) const {
    return flat_memory(of(piece)).narrow(0, piece.begin, piece.end - piece.begin);
  }

  void find_memory() {
    seen.clear();
    for (const NamedTensor& parameter : parameters)
      seen.push_back(parameter.tensor.const_data_ptr());
    for (auto& [name, device] : devices) device.memory.assign(shards.size(), {});
    for (size_t r = 0; r < shards.size(); ++r) {
      for (const ParameterPiece& piece : shards[r]) {
        OnDevice& device = devices[of(piece).device().str()];
        device.memory.resize(shards.size());
        if (piece.end > piece.begin) device.memory[r].push_back(bytes_in(values(piece)));
      }
    }
  }

  /// Whether a parameter's memory was replaced.
  bool has_moved() const {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].tensor.const_data_ptr() != seen[i]) return true;
    }
    return false;
  }

  void follow_memory() {
    if (!has_moved()) return;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& tensor = parameters[i].tensor;
      require_usable(parameters[i]);
      if (tensor.scalar_type() == dtypes[i] && tensor.device() == places[i] &&
          tensor.numel() == numels[i])
        continue;
      throw InvalidArgument(me() + "parameter '" + parameters[i].name +
                            "' has another dtype, device or size than when the optimizer was made: "
                            "change the model first, and make the optimizer then");
    }
    find_memory();
    for (size_t i = 0; i < own().size(); ++i) {
      if (!is_whole(own()[i], of(own()[i]))) tensors[i].set_data(values(own()[i]));
    }
  }

  void make_buffers(OnDevice& device, at::Device at) {
    const int64_t bytes = bytes_of(device.memory[rank]);
    const auto host = at.is_cpu() ? host_backend_of(*group) : nullptr;
    device.shared = host && host->shares_memory();
    int64_t most = 1;
    for (const auto& of_rank : device.memory) most = std::max(most, bytes_of(of_rank));
    const at::TensorOptions options = at::TensorOptions(at).dtype(at::kByte);
    for (at::Tensor& buffer : device.sent) {
      buffer = device.shared
                   ? host->allocateTensor(std::max<long>(1, static_cast<long>(bytes)), options)
                   : at::zeros({most}, options);
    }
    copy_all(split_like(device.sent[0], device.memory[rank]), device.memory[rank]);
  }

  void exchange(OnDevice& device, const std::string& what) {
    const at::Tensor& mine = device.sent[static_cast<size_t>((steps + 1) % 2)];
    if (device.shared) return all_gather_parts(what, *group, device.memory, mine);
    const auto& own_memory = device.memory[rank];
    const c10::OptionalDeviceGuard guard(mine.device());
    copy_all(split_like(mine, own_memory), own_memory);
    const auto ranks = static_cast<int64_t>(shards.size());
    const at::Tensor all = at::empty({ranks * mine.numel()}, mine.options());
    run_collective(what, *group, [&] { return issue_all_gather(what, *group, all, mine); });
    for (size_t r = 0; r < shards.size(); ++r) {
      if (r == rank) continue;
      const at::Tensor of_rank =
          all.narrow(0, static_cast<int64_t>(r) * mine.numel(), mine.numel());
      copy_all(device.memory[r], split_like(of_rank, device.memory[r]));
    }
  }

  void remember_versions() {
    versions.clear();
    for (const ParameterPiece& piece : own()) versions.push_back(of(piece)._version());
  }

  /// What somebody has changed since the last publish(), such as a checkpoint that was loaded.
  void save_changes() {
    if (shards.size() == 1) return;
    bool changed = false;
    for (size_t i = 0; i < own().size(); ++i) changed |= of(own()[i])._version() != versions[i];
    for (auto& [name, device] : devices) {
      const auto& memory = device.memory[rank];
      device.saved = changed && !memory.empty() ? at::cat(memory) : at::Tensor();
    }
  }

  void restore() {
    for (auto& [name, device] : devices) {
      const at::Tensor& sent = device.sent[static_cast<size_t>(steps % 2)];
      const at::Tensor& before = device.saved.defined() ? device.saved : sent;
      copy_all(device.memory[rank], split_like(before, device.memory[rank]));
    }
  }
};

ParameterShards::ParameterShards(std::vector<NamedTensor> parameters,
                                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                                 const std::vector<double>& costs, bool whole)
    : state_(std::make_unique<State>()) {
  if (!group) throw InvalidArgument("ParameterShards: the process group is null");
  State& state = *state_;
  state.parameters = std::move(parameters);
  state.group = std::move(group);
  state.rank = static_cast<size_t>(state.group->getRank());
  std::string all_costs;
  for (const double cost : costs) all_costs += std::to_string(cost) + ' ';
  verify_same_model(
      state.parameters,
      {std::string("whole_parameters=") + (whole ? "True" : "False"), "costs=" + all_costs},
      state.group);
  std::vector<at::Tensor> values;
  for (const NamedTensor& parameter : state.parameters) {
    state.require_usable(parameter);
    values.push_back(parameter.tensor);
    state.numels.push_back(parameter.tensor.numel());
    state.dtypes.push_back(parameter.tensor.scalar_type());
    state.places.push_back(parameter.tensor.device());
  }
  broadcast_coalesced(values, state.group, 0, kBroadcastBytes, "broadcast of parameters");
  state.shards = assign_shards(state.numels, costs, state.group->getSize(), whole);
  state.find_memory();
  for (const ParameterPiece& piece : state.own()) {
    const at::Tensor& parameter = state.of(piece);
    state.tensors.push_back(is_whole(piece, parameter) ? parameter : state.values(piece));
  }
  state.remember_versions();
  const at::NoGradGuard no_grad;
  if (state.shards.size() == 1) return;
  for (auto& [name, device] : state.devices) state.make_buffers(device, at::Device(name));
}

ParameterShards::~ParameterShards() = default;

const std::vector<std::vector<ParameterPiece>>& ParameterShards::shards() const {
  return state_->shards;
}

const std::vector<at::Tensor>& ParameterShards::tensors() const { return state_->tensors; }

void ParameterShards::take_gradients() {
  State& state = *state_;
  const at::NoGradGuard no_grad;
  state.follow_memory();
  state.save_changes();
  for (const NamedTensor& parameter : state.parameters) {
    const at::Tensor& grad = parameter.tensor.grad();
    if (grad.defined() && grad.layout() != at::kStrided) {
      throw InvalidArgument(state.me() + "the gradient of parameter '" + parameter.name +
                            "' is sparse, and a sharded optimizer cannot step it: construct the "
                            "layer with sparse=False, or give it an optimizer of its own");
    }
  }
  for (size_t i = 0; i < state.tensors.size(); ++i) {
    const ParameterPiece& piece = state.own()[i];
    const at::Tensor& parameter = state.of(piece);
    if (is_whole(piece, parameter)) continue;
    at::Tensor grad = parameter.grad();
    if (grad.defined()) {
      if (grad.strides() != parameter.strides() || !has_memory(grad) || grad.is_conj() ||
          grad.is_neg()) {
        const at::Tensor like =
            at::empty_like(parameter, grad.options(), at::MemoryFormat::Preserve);
        grad = like.copy_(grad);
      }
      grad = flat_memory(grad).narrow(0, piece.begin, piece.end - piece.begin);
    }
    state.tensors[i].mutable_grad() = grad;
  }
}

void ParameterShards::drop_gradients() {
  const State& state = *state_;
  for (size_t i = 0; i < state.tensors.size(); ++i) {
    const ParameterPiece& piece = state.own()[i];
    if (!is_whole(piece, state.of(piece))) state.tensors[i].mutable_grad().reset();
  }
}

void ParameterShards::publish() {
  State& state = *state_;
  if (state.shards.size() == 1) return;
  const at::NoGradGuard no_grad;
  const std::string what =
      "publication of step " + std::to_string(state.steps + 1) + " of a ShardedOptimizer";
  try {
    for (auto& [name, device] : state.devices) state.exchange(device, what);
  } catch (...) {
    state.restore();
    throw;
  }
  ++state.steps;
  for (size_t r = 0; r < state.shards.size(); ++r) {
    for (const ParameterPiece& piece : state.shards[r])
      state.of(piece).unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
  }
  state.remember_versions();
}

void ParameterShards::give_up(const std::string& why) noexcept {
  State& state = *state_;
  if (state.shards.size() == 1) return;
  try {
    const at::NoGradGuard no_grad;
    state.restore();
  } catch (const std::exception&) {
    // What is told to the others matters more.
  }
  announce_failure(*state.group, "a step of a ShardedOptimizer: " + why);
}

}  // namespace apex::parallel
