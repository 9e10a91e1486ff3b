// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/detail/model_sync.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>
#include <unordered_set>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "comm/scale_in_place.h"
#include "fingerprint.h"
#include "plain_text.h"
#include "tensor_memory.h"
#include "torch_version.h"

namespace apex::parallel {

namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

void require_group(const GroupPtr& group, const char* function) {
  if (group) return;
  throw InvalidArgument(std::string(function) +
                        " needs a process group, got null, which new_group() returns on ranks that "
                        "are not members");
}

/// One line per tensor. Two ranks agree exactly when their descriptions are equal, and the first
/// line that differs is the message.
std::string describe(const NamedTensor& entry) {
  const at::Tensor& tensor = entry.tensor;
  PlainText out;
  out << "'" << entry.name << "' " << tensor.scalar_type() << ' ' << tensor.sizes();
  if (tensor.layout() == at::kStrided) {
    out << " strides " << tensor.strides();
  } else {
    out << " layout " << tensor.layout();
  }
  if (tensor.is_meta()) {
    out << " on meta";
  } else if (tensor.layout() == at::kStrided && tensor.numel() > 0 && !has_memory(tensor)) {
    out << " without memory";
  }
  out << (tensor.requires_grad() ? ", trainable" : ", frozen");
  return out.str();
}

constexpr const char* kComparison = "comparison of the models";

/// All-gathers one tensor of the same shape from each rank; result on the CPU, [world, ...].
at::Tensor all_gather_host(const at::Tensor& mine, at::Device device, const GroupPtr& group) {
  const at::Tensor share = mine.to(device);
  std::vector<int64_t> shape = share.sizes().vec();
  shape.insert(shape.begin(), group->getSize());
  const at::Tensor all = at::empty(shape, share.options());
  run_collective(kComparison, *group, [&] {
    return issue_all_gather(kComparison, *group, all.view({-1}), share.view({-1}));
  });
  return all.cpu();
}

/// A parsed model description: a line per setting, then a line per tensor, which begins with a
/// quotation mark.
struct Description {
  explicit Description(const std::string& text) {
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);)
      (line[0] == '\'' ? tensors : settings).push_back(line);
  }

  /// "with NAME=...", or "without NAME" where it was left at its default.
  std::string setting(const std::string& name) const {
    for (const std::string& line : settings) {
      if (name_of(line) == name) return "with " + line;
    }
    return "without " + name;
  }

  std::string tensor(size_t i) const { return i < tensors.size() ? tensors[i] : "missing"; }

  static std::string name_of(const std::string& line) { return line.substr(0, line.find('=')); }

  std::vector<std::string> settings, tensors;
};

std::string difference(int64_t rank, const Description& expected, const Description& actual) {
  PlainText out;
  // Start with the rank that has more settings: a setting of only one rank was set by its user.
  const bool more = actual.settings.size() > expected.settings.size();
  for (const auto* const settings : {more ? &actual : &expected, more ? &expected : &actual}) {
    for (const std::string& line : settings->settings) {
      const std::string name = Description::name_of(line);
      if (expected.setting(name) == actual.setting(name)) continue;
      out << "rank 0 was constructed " << expected.setting(name) << ", rank " << rank << ' '
          << actual.setting(name);
      return out.str();
    }
  }
  size_t i = 0;
  const size_t most = std::max(expected.tensors.size(), actual.tensors.size());
  while (i < most && expected.tensor(i) == actual.tensor(i)) ++i;
  out << "parameter " << i << " is " << expected.tensor(i) << " on rank 0 and " << actual.tensor(i)
      << " on rank " << rank << " (" << expected.tensors.size() << " and " << actual.tensors.size()
      << " parameters in all)";
  return out.str();
}

}  // namespace

at::Device control_device(const GroupPtr& group, at::Device fallback) {
  require_group(group, "control_device");
  if (detail::has_backend(*group, at::kCPU)) return at::Device(at::kCPU);
  if (!fallback.is_cpu()) return fallback;
  for (const c10::Device& device : group->getDeviceTypes())  // no tensor is on one
    return c10::impl::VirtualGuardImpl(device.type()).getDevice();
  return fallback;
}

void verify_same_model(const std::vector<NamedTensor>& tensors,
                       const std::vector<std::string>& settings, const GroupPtr& group) {
  require_group(group, "verify_same_model");
  for (const NamedTensor& entry : tensors) {
    if (!entry.tensor.defined())
      throw InvalidArgument("verify_same_model: tensor '" + entry.name + "' is undefined");
  }
  const int world = group->getSize();
  if (world == 1) return;
  std::string text;
  for (const std::string& setting : settings) text += setting + '\n';
  at::Device fallback(at::kCPU);
  for (const NamedTensor& entry : tensors) {
    text += describe(entry) + '\n';
    if (fallback.is_cpu() && !entry.tensor.is_meta()) fallback = entry.tensor.device();
  }
  const at::Device device = control_device(group, fallback);

  const at::Tensor mine =
      at::tensor({static_cast<int64_t>(tensors.size()), static_cast<int64_t>(text.size()),
                  Fingerprint().add(text.data(), text.size()).value()},
                 at::kLong);
  const at::Tensor all = all_gather_host(mine, device, group);
  if (all.eq(all[0]).all().item<bool>()) return;

  // All ranks have the same table, so all of them reach this point.
  const int64_t longest = all.select(1, 1).max().item<int64_t>();
  at::Tensor padded = at::zeros({std::max<int64_t>(longest, 1)}, at::kByte);
  std::memcpy(padded.data_ptr(), text.data(), text.size());
  const at::Tensor texts = all_gather_host(padded, device, group).contiguous();
  const auto text_of = [&](int rank) {
    const char* data = reinterpret_cast<const char*>(texts[rank].const_data_ptr<uint8_t>());
    return std::string(data, static_cast<size_t>(all[rank][1].item<int64_t>()));
  };
  for (int rank = 1; rank < world; ++rank) {
    if (text_of(rank) == text_of(0)) continue;
    PlainText out;
    out << "rank " << rank << "'s model differs from rank 0's: "
        << difference(rank, Description(text_of(0)), Description(text_of(rank)))
        << ". Construct the same model, with the same options and mixed precision, in "
           "the same order on every rank."
        << note_on_ranks(*group);
    throw RankMismatch(out.str());
  }
}

void require_sendable(const std::vector<NamedTensor>& tensors, const std::string& what,
                      const GroupPtr& group) {
  for (const NamedTensor& entry : tensors) {
    const std::string why = why_not_sendable(entry.tensor);
    if (why.empty()) continue;
    throw InvalidArgument("rank " + std::to_string(group->getRank()) + ": " + what + " '" +
                          entry.name + "' cannot be synchronized, since " + why +
                          ": replace it before the model is wrapped, or leave it out");
  }
}

namespace {

/// Tensors that fit in one message.
struct Batch {
  at::Device device;
  at::ScalarType dtype;
  std::vector<at::Tensor> tensors;
};

std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& tensors, const char* what) {
  std::vector<at::Tensor> result;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_meta() || tensor.numel() == 0) continue;
    if (tensor.layout() != at::kStrided) {
      PlainText out;
      out << what << " takes strided tensors, got one of layout " << tensor.layout()
          << " and shape " << tensor.sizes();
      throw InvalidArgument(out.str());
    }
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) result.push_back(tensor.detach());
  }
  return result;
}

Batch& batch_for(std::vector<Batch>& batches, at::Device device, at::ScalarType dtype) {
  for (Batch& batch : batches) {
    if (batch.device == device && batch.dtype == dtype) return batch;
  }
  batches.push_back({device, dtype, {}});
  return batches.back();
}

/// The elements of a tensor as a flat byte tensor, in logical order.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(at::kByte);
}

/// Copies `values` into `target`, of the same shape. Also works for an expanded `target`, whose
/// elements share memory, where copy_() would refuse.
void overwrite(at::Tensor target, at::Tensor values) {
  for (int64_t dim = 0; dim < target.dim(); ++dim) {
    if (target.stride(dim) != 0 || target.size(dim) <= 1) continue;
    target = target.narrow(dim, 0, 1);
    values = values.narrow(dim, 0, 1);
  }
  target.copy_(values);
}

/// Broadcasts flat byte tensors on one device in one message. Returns which of them have changed.
std::vector<bool> broadcast_pieces(const std::vector<at::Tensor>& pieces, const GroupPtr& group,
                                   int64_t root, const std::string& what) {
  const bool receives = group->getRank() != root;
  std::vector<int64_t> lengths;
  for (const at::Tensor& piece : pieces) lengths.push_back(piece.numel());
  const at::Tensor flat = receives
                              ? at::empty({c10::sum_integers(lengths)}, pieces.front().options())
                          : pieces.size() == 1 ? pieces[0]
                                               : at::cat(pieces);
  run_collective(what, *group, [&] { return issue_broadcast(what, *group, flat, root); });
  std::vector<bool> changed(pieces.size(), receives);
  if (!receives) return changed;
  if (!flat.is_cpu()) {
    const std::vector<at::Tensor> received = flat.split_with_sizes(lengths);
    const c10::InferenceMode any;  // for tensors created in inference mode
    at::_foreach_copy_(pieces, received);
    return changed;
  }
  // Unchanged parts are not written: a forward whose backward is pending may have saved them.
  // Compares bytes, since -0.0 equals 0.0, and a NaN does not equal itself.
  const auto* received = static_cast<const uint8_t*>(flat.const_data_ptr());
  for (size_t i = 0; i < pieces.size(); received += lengths[i++]) {
    const auto length = static_cast<size_t>(lengths[i]);
    changed[i] = std::memcmp(pieces[i].const_data_ptr(), received, length) != 0;
    if (changed[i]) std::memcpy(pieces[i].mutable_data_ptr(), received, length);
  }
  return changed;
}

void broadcast_chunk(const std::vector<at::Tensor>& chunk, const GroupPtr& group, int64_t root,
                     const std::string& what) {
  // For each tensor its memory, or a copy if the memory is not in logical order.
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : chunk) parts.push_back(as_bytes(tensor));
  std::vector<bool> changed;
  if (chunk.size() > 1) {
    changed = broadcast_pieces(parts, group, root, what);
  } else {  // it may be larger than a message
    changed = {false};
    for (const at::Tensor& piece : parts[0].split(kBroadcastBytes))
      changed[0] = broadcast_pieces({piece}, group, root, what)[0] || changed[0];
  }
  for (size_t i = 0; i < chunk.size(); ++i) {
    if (!changed[i]) continue;
    const at::Tensor& target = chunk[i];
    std::optional<c10::InferenceMode> inference;  // to write tensors created in it
    if (target.is_inference()) inference.emplace();
    if (parts[i].is_alias_of(target)) {
      target.unsafeGetTensorImpl()->bump_version();  // written without autograd's knowledge
    } else {
      overwrite(target, parts[i].view(target.scalar_type()).view(target.sizes()));
    }
  }
}

}  // namespace

void broadcast_coalesced(const std::vector<at::Tensor>& tensors, const GroupPtr& group,
                         int64_t root, int64_t chunk_bytes, const std::string& what) {
  require_group(group, "broadcast_coalesced");
  if (root < 0 || root >= group->getSize()) {
    throw InvalidArgument("broadcast_coalesced: root rank " + std::to_string(root) +
                          " is not in the group of " + std::to_string(group->getSize()));
  }
  at::NoGradGuard no_grad;
  std::vector<Batch> batches;
  for (const at::Tensor& tensor : distinct(tensors, "broadcast_coalesced")) {
    if (!has_memory(tensor)) continue;  // see Note [Tensors without memory]
    batch_for(batches, tensor.device(), at::kByte).tensors.push_back(tensor);
  }
  if (group->getSize() == 1) return;
  for (const Batch& batch : batches) {
    const c10::OptionalDeviceGuard guard(batch.device);
    std::vector<at::Tensor> chunk;
    int64_t bytes = 0;
    for (const at::Tensor& tensor : batch.tensors) {
      const int64_t size = static_cast<int64_t>(tensor.numel() * tensor.element_size());
      if (!chunk.empty() && bytes + size > chunk_bytes) {
        broadcast_chunk(chunk, group, root, what);
        chunk.clear();
        bytes = 0;
      }
      chunk.push_back(tensor);
      bytes += size;
    }
    if (!chunk.empty()) broadcast_chunk(chunk, group, root, what);
  }
}

std::string broadcast_text(const std::string& text, const GroupPtr& group, int64_t root,
                           const std::string& what) {
  require_group(group, "broadcast_text");
  const at::Device device = control_device(group, at::kCPU);
  at::Tensor size = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(device);
  broadcast_coalesced({size}, group, root, kBroadcastBytes, what);
  const auto bytes = static_cast<size_t>(size.item<int64_t>());
  std::string result = group->getRank() == root ? text : std::string(bytes, '\0');
  const at::Tensor here = at::from_blob(result.data(), {static_cast<int64_t>(bytes)}, at::kByte);
  const at::Tensor sent = here.to(device);
  broadcast_coalesced({sent}, group, root, kBroadcastBytes, what);
  if (!device.is_cpu()) at::Tensor(here).copy_(sent);
  return result;
}

void all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const GroupPtr& group,
                          double scale, const std::string& what) {
  require_group(group, "all_reduce_coalesced");
  at::NoGradGuard no_grad;
  std::vector<Batch> batches;
  for (const at::Tensor& tensor : distinct(tensors, "all_reduce_coalesced")) {
    if (!has_memory(tensor)) {
      throw InvalidArgument(
          "all_reduce_coalesced needs tensors with memory, got a tensor subclass without: pass its "
          "inner tensors");
    }
    const at::ScalarType dtype = tensor.scalar_type();
    if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) {
      PlainText out;
      out << "all_reduce_coalesced needs floating or complex tensors, got " << dtype;
      throw InvalidArgument(out.str());
    }
    batch_for(batches, tensor.device(), dtype).tensors.push_back(tensor);
  }
  for (const Batch& batch : batches) {
    const c10::OptionalDeviceGuard guard(batch.device);
    std::vector<at::Tensor> pieces;
    for (const at::Tensor& tensor : batch.tensors) pieces.push_back(tensor.reshape(-1));
    at::Tensor flat = at::cat(pieces);
    const at::Tensor message = at::isComplexType(batch.dtype) ? at::view_as_real(flat) : flat;
    run_collective(what, *group, [&] { return issue_all_reduce(what, *group, message); });
    if (scale != 1.0) scale_in_place(flat, scale);
    std::vector<at::Tensor> targets;
    std::vector<at::Tensor> results;
    int64_t offset = 0;
    for (const at::Tensor& tensor : batch.tensors) {
      const at::Tensor result = flat.narrow(0, offset, tensor.numel()).view(tensor.sizes());
      offset += tensor.numel();
      if (tensor.is_conj() || tensor.is_neg() ||
          at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
        overwrite(tensor, result);  // multi-tensor functions do not support these
      } else {
        targets.push_back(tensor);
        results.push_back(result);
      }
    }
    if (!targets.empty()) at::_foreach_copy_(targets, results);
  }
}

}  // namespace apex::parallel
