// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/parameter_shards.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include <apex/error.h>
#include <apex/parallel/reducer.h>

#include "comm/collectives.h"
#include "comm/membership.h"
#include "fingerprint.h"
#include "optim/shard_hook.h"
#include "optim/shared_parameters.h"
#include "plain_text.h"
#include "tensor_memory.h"
#include "transport/separate_group.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {

// Note [Before or after a step]
//
// If a rank ends during a step, the other ranks must not keep a mix of new and old parameters. For
// ranks that share memory, see Note [Parameters in shared memory]. Other ranks save their own
// pieces before they step them, and restore them if the step fails. A rank writes the pieces of
// other ranks only after all ranks have sent theirs. A rank whose step has failed may continue with
// another step, whose pieces would be taken for these. So each step of each optimizer has a number,
// which the ranks send with their pieces.
//
// Pieces travel on connections of their own (Note [A separate order of collectives]): a thread that
// saves a checkpoint during training uses the script's group.
//
// On a device, the host does not wait for this exchange. If a rank is lost, the communicator is
// aborted: the all-gather ends with a part of the data, and the device runs everything that was
// enqueued after it. So a second, small collective follows, which sums the ranks' numbers. The sum
// is correct only if every rank has completed the all-gather. (An aborted kernel of NCCL continues
// with the old contents of its buffers, such as the sum of an earlier step.) Depending on this sum,
// the device keeps all parameters from before the step or takes all from after it. The host finds
// the lost rank in a later collective.

namespace {

/// Cut positions are multiples of this, so that SIMD vectors and cache lines are not split.
constexpr int64_t kAlignment = 64;
/// A parameter with fewer elements is not cut.
constexpr int64_t kLeastToCut = 4096;
/// Old or new values are selected in words of this many bytes: see Note [Before or after a step].
constexpr int64_t kWord = sizeof(int64_t);

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

Shards parts_of_each(const std::vector<int64_t>& numels, const std::vector<double>& costs,
                     size_t ranks) {
  std::vector<double> load(ranks);
  Shards shards(ranks);
  const auto each = static_cast<int64_t>(ranks);
  for (size_t i = 0; i < numels.size(); ++i) {
    const auto parameter = static_cast<int64_t>(i);
    if (numels[i] < kLeastToCut) {
      const auto least = std::min_element(load.begin(), load.end());
      *least += costs[i];
      shards[static_cast<size_t>(least - load.begin())].push_back({parameter, 0, numels[i]});
      continue;
    }
    int64_t begin = 0;
    for (int64_t rank = 0; rank < each; ++rank) {
      const int64_t cut = numels[i] / each * (rank + 1) / kAlignment * kAlignment;
      const int64_t end = rank + 1 == each ? numels[i] : cut;
      if (end > begin) shards[static_cast<size_t>(rank)].push_back({parameter, begin, end});
      begin = end;
    }
  }
  return shards;
}

/// A flat view of a tensor without gaps, in the order of its memory.
at::Tensor flat_memory(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

int64_t total_bytes(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.numel();
  return bytes;
}

/// Consecutive views of `flat` with the sizes of `tensors`.
std::vector<at::Tensor> split_like(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    views.push_back(flat.narrow(0, offset, tensor.numel()));
    offset += tensor.numel();
  }
  return views;
}

/// Copies `sources` to `targets`. Call it where autograd is off.
void copy_all(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& sources) {
  if (!targets.empty()) at::_foreach_copy_(targets, sources);
}

}  // namespace

/// The dtype, device and memory layout of a parameter. If they change, the optimizer state of a
/// piece belongs to other elements.
struct ParameterShards::Form {
  explicit Form(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()),
        device(tensor.device()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()) {}
  bool is_that_of(const at::Tensor& tensor) const {
    if (dtype != tensor.scalar_type() || device != tensor.device() || tensor.sizes() != sizes)
      return false;
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] > 1 && strides[d] != tensor.strides()[d]) return false;
    }
    return true;
  }
  at::ScalarType dtype;
  at::Device device;
  std::vector<int64_t> sizes, strides;
};

/// The pieces and buffers on one device.
struct ParameterShards::OnDevice {
  std::vector<std::vector<at::Tensor>> memory;  ///< bytes of the pieces, by rank
  at::Tensor saved;                             ///< of this rank, while a step is not published
  std::unique_ptr<SharedParameters> shared;     ///< replaces the others if ranks share memory

  /// The bytes of a rank's pieces in a new tensor, whose size is the same for all ranks, with
  /// `more` bytes behind them.
  at::Tensor copy(size_t rank, int64_t more = 0) const {
    int64_t most = 0;
    at::Device device(at::kCPU);
    for (const auto& of_rank : memory) {
      most = std::max(most, total_bytes(of_rank));
      if (!of_rank.empty()) device = of_rank.front().device();
    }
    const int64_t size = (most + kWord - 1) / kWord * kWord + more;
    const at::Tensor bytes = at::empty({size}, at::TensorOptions(device).dtype(at::kByte));
    copy_all(split_like(bytes, memory[rank]), memory[rank]);
    return bytes;
  }
};

std::vector<std::vector<ParameterPiece>> assign_shards(const std::vector<int64_t>& numels,
                                                       std::vector<double> costs, int64_t ranks,
                                                       Cut cut) {
  if (costs.empty()) costs.assign(numels.begin(), numels.end());
  if (costs.size() != numels.size()) {
    throw InvalidArgument("assign_shards: " + std::to_string(costs.size()) + " costs for " +
                          std::to_string(numels.size()) + " parameters");
  }
  for (const double cost : costs) {
    if (!(cost >= 0 && std::isfinite(cost)))
      throw InvalidArgument("assign_shards: a cost is " + std::to_string(cost) +
                            "; it must be finite and not negative");
  }
  if (ranks < 1) throw InvalidArgument("assign_shards: there is no rank");
  const auto assign = cut == Cut::kNever ? &whole_parameters
                      : cut == Cut::kFew ? &runs_of_elements
                                         : &parts_of_each;
  return assign(numels, costs, static_cast<size_t>(ranks));
}

struct ParameterShards::State {
  Membership members;  // these ranks split the work; on connections of their own
  c10::intrusive_ptr<c10d::ProcessGroup> replicas;  // all ranks that train the model
  Cut cut = Cut::kFew;
  std::vector<NamedTensor> parameters;
  Shards shards;
  /// Of each parameter, for comm_hook().
  std::shared_ptr<PiecesOfAll> pieces = std::make_shared<PiecesOfAll>();
  std::vector<at::Tensor> tensors;
  std::vector<Form> forms;         ///< of each parameter, when it was added
  std::vector<const void*> seen;   ///< last known address of each parameter
  std::vector<uint32_t> versions;  ///< of this rank's pieces after the last publish()
  std::map<std::string, OnDevice> devices;
  int64_t nonce = 0;   ///< rank 0's random number for this optimizer
  int64_t steps = 0;   ///< published
  bool began = false;  ///< a step has begun and is not published, so restore() would undo it

  const std::vector<ParameterPiece>& own() const { return shards[rank()]; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return members.parent; }
  size_t rank() const { return static_cast<size_t>(members.rank); }
  bool alone() const { return members.alone(); }
  /// Whether other ranks train the model, and may have to agree on a step that failed.
  bool has_others() const { return replicas->getSize() > 1; }

  const at::Tensor& of(const ParameterPiece& piece) const {
    return parameters[static_cast<size_t>(piece.parameter)].tensor;
  }

  std::string me() const { return "rank " + std::to_string(replicas->getRank()) + ": "; }

  /// After a failure, ranks may be in different steps, and their collectives would not match.
  void refuse_failed() const {
    if (!has_failed(*members.control()) && !has_failed(*group()) && !has_failed(*replicas)) return;
    throw CommunicationError(
        me() +
        "an earlier step of a ShardedOptimizer, or another collective of its process group, has "
        "failed, and ranks may have parameters of different steps: restart with a new process "
        "group and a new optimizer, from a checkpoint");
  }

  /// After a backward that failed on this rank, which may have succeeded on others.
  void refuse_partial_gradients() const {
    std::vector<at::Tensor> all;
    for (const NamedTensor& parameter : parameters) all.push_back(parameter.tensor);
    if (!Reducer::has_failed(all)) return;
    throw CommunicationError(me() +
                             "a backward has failed on this rank, and a step would use gradients "
                             "that are not averages: restart with a new process group, from a "
                             "checkpoint");
  }

  [[noreturn]] void refuse(const NamedTensor& parameter, const std::string& why) const {
    throw InvalidArgument(me() + "parameter '" + parameter.name + "' " + why);
  }

  void require_usable(const NamedTensor& parameter) const {
    const at::Tensor& tensor = parameter.tensor;
    if (!tensor.defined()) refuse(parameter, "is undefined");
    if (tensor.layout() != at::kStrided || !has_memory(tensor)) {
      refuse(parameter,
             "is a tensor subclass, sparse, or on the meta device: its memory cannot be sharded");
    }
    if (tensor.is_inference())
      refuse(parameter, "was made in inference mode, and cannot be trained: clone it outside");
    if (tensor.is_conj() || tensor.is_neg())
      refuse(parameter, "is conjugated or negated when it is read: replace it by a clone");
    if (!tensor.is_non_overlapping_and_dense()) {
      refuse(parameter,
             "has gaps in its memory: replace it by a contiguous one before the optimizer is made");
    }
  }

  void refuse_sparse(const NamedTensor& parameter) const {
    const at::Tensor& grad = parameter.tensor.grad();
    if (!grad.defined() || grad.layout() == at::kStrided) return;
    throw InvalidArgument(me() + "the gradient of parameter '" + parameter.name +
                          "' is sparse, and a sharded optimizer cannot step it: construct the "
                          "layer with sparse=False, or give it an optimizer of its own");
  }

  /// The part of the parameter's gradient, in the order of its memory; undefined without gradient.
  at::Tensor gradient_of(const ParameterPiece& piece) const {
    const at::Tensor& parameter = of(piece);
    at::Tensor grad = parameter.grad();
    if (!grad.defined() || is_whole(piece, parameter)) return grad;
    if (grad.strides() != parameter.strides() || !has_memory(grad) || grad.is_conj() ||
        grad.is_neg()) {
      const at::Tensor like = at::empty_like(parameter, grad.options(), at::MemoryFormat::Preserve);
      grad = like.copy_(grad);
    }
    return flat_memory(grad).narrow(0, piece.begin, piece.end - piece.begin);
  }

  /// Throws if parameters share memory, because two ranks would step the same elements.
  void require_apart() const {
    std::map<const char*, size_t> begins;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].tensor.numel() == 0) continue;
      const auto* const begin = static_cast<const char*>(parameters[i].tensor.const_data_ptr());
      const auto [at, is_new] = begins.emplace(begin, i);
      const auto next = std::next(at);
      const auto overlaps = [&](size_t left, const char* right) {
        const at::Tensor& tensor = parameters[left].tensor;
        return static_cast<const char*>(tensor.const_data_ptr()) + tensor.nbytes() > right;
      };
      if (!is_new || (at != begins.begin() && overlaps(std::prev(at)->second, begin)) ||
          (next != begins.end() && overlaps(i, next->first))) {
        refuse(parameters[i], "shares memory with another one, or was given twice: give it once");
      }
    }
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
        if (piece.end > piece.begin && !device.shared)
          device.memory[r].push_back(bytes_of(of(piece), piece));
      }
    }
  }

  /// Returns whether a parameter's memory was replaced.
  bool follow_memory() {
    bool moved = false;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& tensor = parameters[i].tensor;
      const bool replaced = tensor.const_data_ptr() != seen[i];
      if (!replaced && forms[i].is_that_of(tensor)) continue;
      moved = true;
      require_usable(parameters[i]);
      if (!forms[i].is_that_of(tensor)) {
        refuse(
            parameters[i],
            "has another dtype, device, shape or memory format than when the optimizer was made: "
            "change the model first, and make the optimizer then");
      }
    }
    if (!moved) return false;
    find_memory();
    for (auto& [name, device] : devices) {
      if (device.shared) device.shared->find_memory();
    }
    for (size_t i = 0; i < own().size(); ++i) {
      if (!is_whole(own()[i], of(own()[i]))) tensors[i].set_data(values(own()[i]));
    }
    return true;
  }

  /// Moves the parameters on the CPU from index `from` on, with the pieces `added`, into shared
  /// memory.
  void share(OnDevice& device, const Shards& added, size_t from) {
    std::vector<at::Tensor> on_cpu;
    std::vector<int64_t> index;  // in on_cpu; -1: on another device
    for (size_t i = from; i < parameters.size(); ++i) {
      const bool here = parameters[i].tensor.is_cpu();
      index.push_back(here ? static_cast<int64_t>(on_cpu.size()) : -1);
      if (here) on_cpu.push_back(parameters[i].tensor);
    }
    SharedParameters::Pieces pieces(added.size());
    for (size_t r = 0; r < added.size(); ++r) {
      for (ParameterPiece piece : added[r]) {
        piece.parameter = index[static_cast<size_t>(piece.parameter)];
        if (piece.parameter >= 0) pieces[r].push_back(piece);
      }
    }
    if (!device.shared) device.shared = std::make_unique<SharedParameters>(members);
    device.shared->add(on_cpu, pieces);
  }

  void add(const std::vector<NamedTensor>& more, const std::vector<double>& costs) {
    const std::string whole = cut == Cut::kNever ? "True" : "False";
    verify_same_model(more, {"whole_parameters=" + whole}, replicas);
    const size_t before = parameters.size();
    std::vector<int64_t> numels;
    std::vector<at::Tensor> given;
    for (const NamedTensor& parameter : more) {
      given.push_back(parameter.tensor);
      numels.push_back(parameter.tensor.numel());
    }
    // If only one rank throws, the others must be notified.
    std::exception_ptr refused;
    Shards added;
    PlainText said;
    parameters.insert(parameters.end(), more.begin(), more.end());
    try {
      for (const NamedTensor& parameter : more) require_usable(parameter);
      require_apart();
      added = assign_shards(numels, costs, static_cast<int64_t>(shards.size()), cut);
      for (const auto& shard : added) {
        for (const ParameterPiece& piece : shard)
          said << piece.parameter << ':' << piece.end << ' ';
        said << "| ";
      }
    } catch (const InvalidArgument&) {
      refused = std::current_exception();
    }
    try {
      verify_same_model({}, {std::string("parameters=") + (refused ? "refused" : "usable")},
                        replicas);
      verify_same_model({}, {"cost=that shares parameters out as " + said.str()}, group());
      if (refused) std::rethrow_exception(refused);
    } catch (...) {
      parameters.resize(before);
      if (refused) std::rethrow_exception(refused);
      throw;
    }
    // On a device of the parameters, since the group may have no backend for others.
    const at::Tensor number = at::full(
        {1}, static_cast<int64_t>(std::random_device{}()),
        at::TensorOptions(given.empty() ? at::kCPU : given.front().device()).dtype(at::kLong));
    std::vector<at::Tensor> sent = given;
    if (!given.empty()) sent.push_back(number);
    broadcast_coalesced(sent, replicas, 0, kBroadcastBytes, "broadcast of parameters");
    const bool on_cpu = std::any_of(given.begin(), given.end(),
                                    [](const at::Tensor& tensor) { return tensor.is_cpu(); });
    if (before == 0) nonce = number.item<int64_t>();
    if (members.shares_groups) {
      members.device = number.device();
      members.separate(on_cpu);
    }
    // Before other tensors refer to the storages.
    if (!alone() && on_cpu) {
      const auto host = host_backend_of(*group());
      if (host && host->shares_memory()) share(devices["cpu"], added, before);
    }
    for (const at::Tensor& tensor : given) forms.emplace_back(tensor);
    for (size_t r = 0; r < shards.size(); ++r) {
      for (ParameterPiece piece : added[r]) {
        piece.parameter += static_cast<int64_t>(before);
        shards[r].push_back(piece);
        auto& known = (*pieces)[of(piece).unsafeGetTensorImpl()];
        known.parameter = of(piece);
        known.pieces.push_back({static_cast<int64_t>(r), piece.begin, piece.end});
        if (r != rank()) continue;
        tensors.push_back(is_whole(piece, of(piece)) ? of(piece) : values(piece));
      }
    }
    find_memory();
    remember_versions();
  }

  /// 31 bits, different from those of other steps and other optimizers.
  int64_t step_number() const {
    const std::array<int64_t, 2> of_step{nonce, steps};
    return static_cast<int64_t>(
        static_cast<uint64_t>(Fingerprint().add(of_step.data(), sizeof(of_step)).value()) >> 33);
  }

  void exchange(OnDevice& device, const std::string& what) {
    if (device.shared) return device.shared->exchange(steps + 1, what);
    if (device.saved.numel() == 0) return;  // on every rank
    const c10::OptionalDeviceGuard guard(device.saved.device());
    const int64_t bytes = device.saved.numel();
    const at::Tensor mine = device.copy(rank(), kWord);
    const auto number_of = [bytes](const at::Tensor& part) {
      return part.narrow(0, bytes, kWord).view(at::kLong);
    };
    const int64_t number = step_number();
    number_of(mine).fill_(number);
    const auto ranks = static_cast<int64_t>(shards.size());
    const at::Tensor all = at::empty({ranks, mine.numel()}, mine.options());
    members.run(what, [&](c10d::ProcessGroup& channel) {
      return issue_all_gather(what, channel, all.view({-1}), mine);
    });
    at::Tensor complete;
    if (mine.is_cpu()) {
      for (int64_t r = 0; r < ranks; ++r) {
        if (number_of(all[r]).item<int64_t>() != number) refuse_other(what, r);
      }
    } else {
      const at::Tensor sum = number_of(mine).clone();
      members.run(what, [&](c10d::ProcessGroup& channel) {
        return issue_all_reduce(what, channel, sum, c10d::ReduceOp::SUM);
      });
      complete = sum.eq(number * ranks);
    }
    for (size_t r = 0; r < shards.size(); ++r) {
      at::Tensor after = all[static_cast<int64_t>(r)].narrow(0, 0, bytes);
      if (complete.defined()) {
        const at::Tensor before = r == rank() ? device.saved : device.copy(r);
        after = at::where(complete, after.view(at::kLong), before.view(at::kLong)).view(at::kByte);
      } else if (r == rank()) {
        continue;
      }
      copy_all(device.memory[r], split_like(after, device.memory[r]));
    }
  }

  [[noreturn]] void refuse_other(const std::string& what, int64_t other) const {
    announce_failure(*group(), what);
    throw CommunicationError(me() + what + ": rank " + std::to_string(other) +
                             " has sent something else; its step has probably failed, and it went "
                             "on with another collective of the process group: see its output" +
                             note_on_ranks(*group()));
  }

  void remember_versions() {
    versions.clear();
    for (const ParameterPiece& piece : own()) versions.push_back(of(piece)._version());
  }

  /// Begins a step. In shared memory, parameters that were changed since the last publish(), for
  /// example by loading a checkpoint, are saved.
  void begin(bool moved) {
    bool changed = moved;
    for (size_t i = 0; i < own().size(); ++i) changed |= of(own()[i])._version() != versions[i];
    for (auto& [name, device] : devices) {
      if (device.shared) {
        device.shared->begin(steps + 1, publication(), changed);
        continue;
      }
      device.saved = device.copy(rank());
    }
    began = true;
  }

  std::string publication() const {
    return "publication of step " + std::to_string(steps + 1) + " of ShardedOptimizer #" +
           std::to_string(nonce % 10000);
  }

  void end() {
    began = false;
    for (auto& [name, device] : devices) device.saved = at::Tensor();
  }

  void restore() {
    for (auto& [name, device] : devices) {
      if (device.shared) device.shared->give_up(steps + 1);
    }
    if (!began) return;
    for (auto& [name, device] : devices) {
      if (device.shared || !device.saved.defined()) continue;
      copy_all(device.memory[rank()], split_like(device.saved, device.memory[rank()]));
    }
    end();
  }

  /// After restore() and after the other ranks were notified.
  void wait_for_others() const {
    for (const auto& [name, device] : devices) {
      if (device.shared) device.shared->wait_for_others(steps + 1);
    }
  }
};

ParameterShards::ParameterShards(std::vector<NamedTensor> parameters,
                                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                                 const std::vector<double>& costs, Cut cut,
                                 c10::intrusive_ptr<c10d::ProcessGroup> replicas)
    : state_(std::make_unique<State>()) {
  if (!group) throw InvalidArgument("ParameterShards: the process group is null");
  state_->shards.resize(static_cast<size_t>(group->getSize()));
  state_->members = Membership({std::move(group)});
  state_->replicas = replicas ? std::move(replicas) : state_->group();
  state_->cut = cut;
  add(std::move(parameters), costs);
}

ParameterShards::~ParameterShards() = default;

void ParameterShards::add(std::vector<NamedTensor> parameters, const std::vector<double>& costs) {
  const at::NoGradGuard no_grad;
  state_->add(parameters, costs);
}

const std::vector<NamedTensor>& ParameterShards::parameters() const { return state_->parameters; }

const c10::intrusive_ptr<c10d::ProcessGroup>& ParameterShards::group() const {
  return state_->group();
}

const std::vector<std::vector<ParameterPiece>>& ParameterShards::shards() const {
  return state_->shards;
}

const std::vector<at::Tensor>& ParameterShards::tensors() const { return state_->tensors; }

std::shared_ptr<CommHook> ParameterShards::comm_hook(const std::vector<const ParameterShards*>& all,
                                                     const Reducer& reducer) {
  auto communicator = reducer.communicator();
  const ReducerOptions options = reducer.options();
  if (!options.gradient_average) {
    throw InvalidArgument(
        "after a reduce-scatter, a rank has only a share of the average, and the reducer was made "
        "with gradient_average=False: leave one of them out");
  }
  std::vector<std::shared_ptr<const PiecesOfAll>> pieces;
  for (const ParameterShards* const shards : all) {
    const State& state = *shards->state_;
    const auto& group = *state.group();
    if (state.replicas->getSize() != group.getSize() || !communicator ||
        communicator->getSize() != group.getSize() || communicator->getRank() != group.getRank()) {
      throw InvalidArgument(state.me() +
                            "a reduce-scatter of gradients needs an optimizer whose work is split "
                            "among all ranks of the reducer (across_hosts=True)");
    }
    pieces.push_back(state.pieces);
  }
  return make_shard_hook(std::move(communicator), std::move(pieces));
}

void ParameterShards::refuse_failed() const { state_->refuse_failed(); }

void ParameterShards::take_gradients() {
  State& state = *state_;
  const at::NoGradGuard no_grad;
  state.refuse_failed();
  state.refuse_partial_gradients();
  const bool moved = state.follow_memory();
  for (const NamedTensor& parameter : state.parameters) state.refuse_sparse(parameter);
  if (state.has_others()) state.begin(moved);
  for (size_t i = 0; i < state.tensors.size(); ++i) {
    const ParameterPiece& piece = state.own()[i];
    const at::Tensor& parameter = state.of(piece);
    if (is_whole(piece, parameter)) continue;
    state.tensors[i].mutable_grad() = state.gradient_of(piece);
  }
}

std::vector<at::Tensor> ParameterShards::gradients() const {
  const at::NoGradGuard no_grad;
  for (const NamedTensor& parameter : state_->parameters) state_->refuse_sparse(parameter);
  std::vector<at::Tensor> all;
  for (const ParameterPiece& piece : state_->own()) {
    at::Tensor grad = state_->gradient_of(piece);
    if (grad.defined()) all.push_back(std::move(grad));
  }
  return all;
}

at::Tensor ParameterShards::total_norm(const std::vector<at::Tensor>& gradients,
                                       double norm_type) const {
  constexpr const char* kWhat = "total norm of gradients";
  const State& state = *state_;
  const at::NoGradGuard no_grad;
  // All that may throw on this rank only comes before the collective, or does not throw.
  for (const NamedTensor& parameter : state.parameters) state.refuse_sparse(parameter);
  const bool wide = std::any_of(
      state.parameters.begin(), state.parameters.end(), [](const NamedTensor& parameter) {
        return c10::toRealValueType(parameter.tensor.scalar_type()) == at::kDouble;
      });
  const at::ScalarType dtype = wide ? at::kDouble : at::kFloat;
  at::TensorOptions options = at::TensorOptions().dtype(dtype);
  if (!state.parameters.empty()) options = options.device(state.parameters[0].tensor.device());
  std::vector<at::Tensor> values;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.numel() == 0) continue;  // has no infinity norm
    const at::Tensor real = gradient.is_complex() ? at::view_as_real(gradient) : gradient;
    values.push_back(real.scalar_type() == at::kDouble ? real.to(dtype) : real);
  }
  const at::Tensor of_ranks = at::zeros({state.members.size}, options);
  if (!values.empty()) {
    std::vector<at::Tensor> norms;
    for (const at::Tensor& norm : at::_foreach_norm(values, norm_type, dtype))
      norms.push_back(norm.to(options));
    const at::Tensor mine = at::linalg_vector_norm(at::stack(norms), norm_type);
    of_ranks[state.members.rank].copy_(mine);
  }
  if (!state.alone()) {
    state.members.run(kWhat, [&](c10d::ProcessGroup& channel) {
      return issue_all_reduce(kWhat, channel, of_ranks);
    });
  }
  return at::linalg_vector_norm(of_ranks, norm_type);
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
  if (state.alone()) return state.end();
  const at::NoGradGuard no_grad;
  try {
    for (auto& [name, device] : state.devices) state.exchange(device, state.publication());
  } catch (...) {
    state.restore();
    state.wait_for_others();
    throw;
  }
  ++state.steps;
  for (size_t r = 0; r < state.shards.size(); ++r) {
    for (const ParameterPiece& piece : state.shards[r])
      state.of(piece).unsafeGetTensorImpl()->bump_version();  // autograd did not see the write
  }
  state.remember_versions();
  state.end();
}

void ParameterShards::give_up(const std::string& why) noexcept {
  State& state = *state_;
  try {
    const at::NoGradGuard no_grad;
    state.restore();
  } catch (const std::exception&) {
    // Notifying the other ranks matters more than this error.
  }
  const std::string what = "a step of a ShardedOptimizer: " + why;
  // The first failure is the cause of later ones.
  if (!state.alone() && !has_failed(*state.group())) announce_failure(*state.group(), what);
  if (state.replicas->getSize() > state.members.size && !has_failed(*state.replicas))
    announce_failure(*state.replicas, what);
  if (!state.alone()) state.wait_for_others();
}

}  // namespace apex::parallel
