// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/checkpoint.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <sstream>
#include <string_view>
#include <system_error>
#include <typeinfo>

#include <ATen/ATen.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <apex/amp/loss_scaler.h>
#include <apex/distributed/collectives.h>
#include <apex/distributed/process_group.h>
#include <apex/error.h>
#include <apex/parallel/model_sync.h>
#include <apex/parallel/overlapped_optimizer.h>

#include "checkpoint/atomic_file.h"
#include "comm/error_text.h"
#include "plain_text.h"

namespace apex::parallel {

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kFormat = "apex::parallel::Checkpoint 2";
constexpr int64_t kMessageBytes = int64_t{256} << 20;

std::string quoted(const std::string& path) { return "the checkpoint '" + path + "'"; }

std::string sampler_key(int64_t rank) { return "sampler" + std::to_string(rank); }

/// The first line of torch's message.
std::string reason(const std::exception_ptr& error) {
  const std::string text = message_of(error);
  return text.substr(0, text.find('\n'));
}

std::string reason_of_system() { return std::generic_category().message(errno); }

at::Tensor bytes_of(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

/// The ranks that save or load together.
class Ranks {
 public:
  Ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device model) : group_(group) {
    if (!group_ && apex::distributed::is_initialized()) {
      group_ = apex::distributed::get_default_group();
    }
    if (group_) device_ = control_device(group_, model);
  }

  int64_t rank() const { return group_ ? group_->getRank() : 0; }
  int64_t size() const { return group_ ? group_->getSize() : 1; }

  std::vector<int64_t> gather(int64_t number) const {
    if (size() == 1) return {number};
    const at::Tensor all =
        apex::distributed::all_gather(at::full({1}, number, at::kLong).to(device_), group_).cpu();
    const int64_t* const data = all.const_data_ptr<int64_t>();
    return {data, data + all.numel()};
  }

  /// Gathers `bytes` of every rank; lengths may differ.
  std::vector<at::Tensor> gather(const at::Tensor& bytes) const {
    const std::vector<int64_t> sizes = gather(bytes.numel());
    if (size() == 1) return {bytes};
    const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
    at::Tensor mine = at::zeros({longest}, at::kByte);
    mine.narrow(0, 0, bytes.numel()).copy_(bytes);
    const at::Tensor all = apex::distributed::all_gather(mine.to(device_), group_).cpu();
    std::vector<at::Tensor> found;
    for (int64_t rank = 0; rank < size(); ++rank) {
      found.push_back(all[rank].narrow(0, 0, sizes[static_cast<size_t>(rank)]));
    }
    return found;
  }

  /// Broadcasts `bytes` of rank `root`; every rank knows the length.
  at::Tensor broadcast(const at::Tensor& bytes, int64_t length, int64_t root) const {
    if (size() == 1) return bytes;
    at::Tensor all = rank() == root ? bytes : at::empty({length}, at::kByte);
    for (int64_t start = 0; start < length; start += kMessageBytes) {
      const at::Tensor part = all.narrow(0, start, std::min(kMessageBytes, length - start));
      const at::Tensor sent = part.to(device_);
      apex::distributed::broadcast(sent, static_cast<int>(root), group_);
      if (rank() != root && !sent.is_alias_of(part)) part.copy_(sent);
    }
    return all;
  }

  /// If any rank has an error, throws that of the first such rank on every rank.
  void agree(const std::string& error) const {
    const std::vector<int64_t> lengths = gather(static_cast<int64_t>(error.size()));
    const auto failed =
        std::find_if(lengths.begin(), lengths.end(), [](int64_t length) { return length > 0; });
    if (failed == lengths.end()) return;
    const at::Tensor text = broadcast(bytes_of(error), *failed, failed - lengths.begin());
    throw Error("rank " + std::to_string(failed - lengths.begin()) + ": " +
                std::string(static_cast<const char*>(text.const_data_ptr()),
                            static_cast<size_t>(text.numel())));
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::Device device_ = at::kCPU;
};

/// The message of the exception that `call` throws; empty if it returns.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
    return {};
  } catch (...) {
    return reason(std::current_exception());
  }
}

/// Reads the whole file. Sets `missing` if it does not exist.
at::Tensor read_file(const std::string& path, bool* missing) {
  // O_NONBLOCK, because a fifo may have no writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) {
    *missing = errno == ENOENT;
    throw Error(quoted(path) + " cannot be read: " + reason_of_system());
  }
  struct Closed {
    int file;
    ~Closed() { ::close(file); }
  } const closed{file};
  struct stat status{};
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    throw Error(quoted(path) + " cannot be read: it is not a regular file");
  }
  at::Tensor bytes = at::empty({static_cast<int64_t>(status.st_size)}, at::kByte);
  char* const data = static_cast<char*>(bytes.mutable_data_ptr());
  for (int64_t done = 0; done < bytes.numel();) {
    const ssize_t got = ::read(file, data + done, static_cast<size_t>(bytes.numel() - done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(quoted(path) + " cannot be read: " + reason_of_system());
    if (got == 0) throw Error(quoted(path) + " was truncated while it was read");
    done += got;
  }
  return bytes;
}

std::string form_of(const at::Tensor& tensor) {
  PlainText text;
  text << "shape " << tensor.sizes() << " and dtype " << c10::toString(tensor.scalar_type());
  return text.str();
}

/// Checks shapes and dtypes. libtorch loads tensors of any shape, and reinterprets the bytes of
/// another dtype.
void require_same_forms(const torch::nn::Module& module, InputArchive& archive,
                        const std::string& path) {
  const auto compare = [&](const auto& items, bool buffers) {
    for (const auto& item : items) {
      at::Tensor found;
      if (!item.value().defined() || !archive.try_read(item.key(), found, buffers)) continue;
      if (found.sizes() == item.value().sizes() &&
          found.scalar_type() == item.value().scalar_type())
        continue;
      throw Error("'" + path + item.key() + "' has " + form_of(item.value()) +
                  " in the model, but " + form_of(found) + " in the file");
    }
  };
  compare(module.named_parameters(/*recurse=*/false), false);
  compare(module.named_buffers(/*recurse=*/false), true);
  for (const auto& child : module.named_children()) {
    InputArchive inner;
    if (archive.try_read(child.key(), inner)) {
      require_same_forms(*child.value(), inner, path + child.key() + ".");
    }
  }
}

/// "torch::optim::SGD of 4 and 2 parameters": the class, and the parameter count of each group. For
/// LARC it describes the wrapped optimizer, as its archive does.
std::string describe(const torch::optim::Optimizer& optimizer) {
  std::string kind, counts;
  for (const auto& group : optimizer.param_groups()) {
    counts += (counts.empty() ? "" : " and ") + std::to_string(group.params().size());
    if (kind.empty() && group.has_options()) kind = c10::demangle(typeid(group.options()).name());
  }
  if (kind.empty()) kind = c10::demangle(typeid(optimizer).name());
  constexpr std::string_view kEnd = "Options";
  if (kind.size() > kEnd.size() && kind.compare(kind.size() - kEnd.size(), kEnd.size(), kEnd) == 0)
    kind.resize(kind.size() - kEnd.size());
  return kind + " of " + (counts.empty() ? "0" : counts) + " parameters";
}

// Bits of the number by which ranks compare their parts.
constexpr int64_t kSampler = 1, kScaler = 2, kLoads = 4, kOptimizer = 8;

/// Only rank 0 writes. A part that rank 0 lacks would be missing from the file, unnoticed until the
/// file is loaded.
void require_same_parts(const char* function, const std::vector<int64_t>& by_rank) {
  const auto other = std::find_if(by_rank.begin(), by_rank.end(),
                                  [&](int64_t given) { return given != by_rank.front(); });
  if (other == by_rank.end()) return;
  const int64_t here = *other, first = by_rank.front();
  // save() and load() both exchange this number first, so that ranks in different ones notice it.
  if (((here ^ first) & kLoads) != 0) {
    throw InvalidArgument("Checkpoint: rank " + std::to_string(other - by_rank.begin()) +
                          (here & kLoads ? " is in load(), but rank 0 in save()"
                                         : " is in save(), but rank 0 in load()") +
                          "; call the same function on every rank");
  }
  const std::string error = std::string("Checkpoint::") + function + "(): rank " +
                            std::to_string(other - by_rank.begin()) + " has ";
  if (here / kOptimizer != first / kOptimizer) {
    throw InvalidArgument(error + std::to_string(here / kOptimizer) +
                          " optimizers, but rank 0 has " + std::to_string(first / kOptimizer) +
                          "; pass the same number on every rank");
  }
  const int64_t part = ((here ^ first) & kSampler) != 0 ? kSampler : kScaler;
  const std::string name = part == kSampler ? "sampler" : "scaler";
  throw InvalidArgument(error +
                        ((here & part) != 0 ? "a " + name + ", but rank 0 does not"
                                            : "no " + name + ", but rank 0 does") +
                        "; pass one on every rank or on none");
}

std::string description_key(const std::string& part) { return part + "_is"; }

}  // namespace

Checkpoint& Checkpoint::optimizer(torch::optim::Optimizer& optimizer) {
  parts_.push_back({"optimizer" + std::to_string(optimizers_++),
                    [&optimizer](OutputArchive& archive) { optimizer.save(archive); },
                    [&optimizer](InputArchive& archive) { optimizer.load(archive); }, &optimizer});
  return *this;
}

Checkpoint& Checkpoint::optimizer(OverlappedOptimizer& optimizer) {
  parts_.push_back({"optimizer" + std::to_string(optimizers_++),
                    [&optimizer](OutputArchive& archive) { optimizer.save(archive); },
                    [&optimizer](InputArchive& archive) { optimizer.load(archive); },
                    &optimizer.optimizer()});
  return *this;
}

void Checkpoint::throw_null_model() {
  throw InvalidArgument("Checkpoint: the model is null; construct it first, e.g. Net()");
}

int64_t Checkpoint::given() const {
  const bool scaler = std::any_of(parts_.begin(), parts_.end(),
                                  [](const Part& part) { return part.name == "scaler"; });
  return optimizers_ * kOptimizer + (scaler ? kScaler : 0) + (sampler_ != nullptr ? kSampler : 0);
}

Checkpoint& Checkpoint::scaler(amp::LossScaler& scaler) {
  if ((given() & kScaler) != 0) {
    throw InvalidArgument(
        "Checkpoint::scaler() was called twice; a checkpoint has only one scaler");
  }
  parts_.push_back({"scaler", [&scaler](OutputArchive& archive) { scaler.save(archive); },
                    [&scaler](InputArchive& archive) { scaler.load(archive); }, nullptr});
  return *this;
}

Checkpoint& Checkpoint::sampler(torch::data::samplers::Sampler<>& sampler) {
  sampler_ = &sampler;
  return *this;
}

Checkpoint& Checkpoint::process_group(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  group_ = std::move(group);
  return *this;
}

at::Device Checkpoint::device() const {
  const std::vector<at::Tensor> parameters = model_.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
}

void Checkpoint::write(const std::string& path, int64_t step,
                       const std::vector<at::Tensor>& samplers) const {
  OutputArchive archive;
  archive.write("format", c10::IValue(std::string(kFormat)));
  archive.write("step", c10::IValue(step));
  archive.write("world_size", c10::IValue(static_cast<int64_t>(samplers.size())));
  const auto nested = [&](const std::string& name, const auto& save) {
    OutputArchive inner(archive.compilation_unit());
    save(inner);
    archive.write(name, inner);
  };
  nested("model", [&](OutputArchive& inner) { model_.save(inner); });
  for (const Part& part : parts_) {
    nested(part.name, part.save);
    if (part.optimizer == nullptr) continue;
    archive.write(description_key(part.name), c10::IValue(describe(*part.optimizer)));
  }
  for (size_t rank = 0; sampler_ != nullptr && rank < samplers.size(); ++rank) {
    archive.write(sampler_key(static_cast<int64_t>(rank)), samplers[rank], /*is_buffer=*/true);
  }
  detail::AtomicFile file(path);
  // Keep the error until torch has finished, since torch also writes in a destructor.
  std::exception_ptr failed;
  archive.save_to([&](const void* data, size_t size) {
    try {
      if (!failed) file.write(data, size);
    } catch (...) {
      failed = std::current_exception();
    }
    return size;
  });
  if (failed) std::rethrow_exception(failed);
  file.commit();
}

void Checkpoint::save(const std::string& path, int64_t step) {
  const Ranks ranks(group_, device());
  require_same_parts("save", ranks.gather(given()));
  // Every rank checks the steps of all ranks, so that no rank waits for a rank that throws.
  const std::vector<int64_t> steps = ranks.gather(step);
  const auto negative =
      std::find_if(steps.begin(), steps.end(), [](int64_t one) { return one < 0; });
  if (negative != steps.end()) {
    throw InvalidArgument("Checkpoint::save(): the step of rank " +
                          std::to_string(negative - steps.begin()) + " is " +
                          std::to_string(*negative) + "; it must not be negative");
  }
  std::string sampler;
  ranks.agree(error_of([&] {
    if (sampler_ == nullptr) return;
    OutputArchive archive;
    sampler_->save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    sampler = stream.str();
  }));
  const std::vector<at::Tensor> samplers = ranks.gather(bytes_of(sampler));
  const std::string error =
      ranks.rank() == 0 ? error_of([&] { write(path, step, samplers); }) : std::string();
  ranks.agree(error.empty() ? error : quoted(path) + " cannot be written: " + error);
}

void Checkpoint::read(const std::string& path, const at::Tensor& bytes, int64_t* step) const {
  const Ranks ranks(group_, device());
  InputArchive archive;
  c10::IValue value;
  try {
    archive.load_from(static_cast<const char*>(bytes.const_data_ptr()),
                      static_cast<size_t>(bytes.numel()), device());
  } catch (...) {
    throw Error("it is truncated, or is not a checkpoint");
  }
  if (!archive.try_read("format", value) || !value.isString() || value.toStringRef() != kFormat) {
    throw Error("it was not written by this version of apex::parallel::Checkpoint");
  }
  const auto nested = [&](const std::string& name) {
    InputArchive inner;
    if (!archive.try_read(name, inner)) throw Error("it has no " + name);
    return inner;
  };
  // Check everything that can be checked before anything is changed.
  InputArchive model = nested("model");
  require_same_forms(model_, model, "");
  std::vector<InputArchive> inner;
  for (const Part& part : parts_) {
    inner.push_back(nested(part.name));
    if (part.optimizer == nullptr) continue;
    // libtorch would fail an assertion after changing some of the state.
    archive.read(description_key(part.name), value);
    const std::string here = describe(*part.optimizer);
    if (value.toStringRef() == here) continue;
    throw Error("its " + part.name + " is " + value.toStringRef() + ", but in this program it is " +
                here + ": pass the saved optimizers, in their order, or none");
  }
  at::Tensor sampler;
  if (sampler_ != nullptr) {
    archive.read("world_size", value);
    if (!archive.try_read(sampler_key(0), sampler, /*is_buffer=*/true)) {
      throw Error("it has no sampler");
    }
    if (value.toInt() != ranks.size()) {
      throw Error("it holds the samplers of " + std::to_string(value.toInt()) +
                  " ranks, but this job has " + std::to_string(ranks.size()) +
                  ": load without the sampler, and restart the epoch");
    }
    sampler = at::Tensor();
    archive.read(sampler_key(ranks.rank()), sampler, /*is_buffer=*/true);
    sampler = sampler.cpu();
  }
  archive.read("step", value);
  *step = value.toInt();

  // Load optimizers first: pending updates are applied then, and they belong to the old model.
  std::string name;
  try {
    for (size_t i = 0; i < parts_.size(); ++i) {
      name = parts_[i].name;
      parts_[i].load(inner[i]);
    }
    name = "model";
    model_.load(model);
    if (sampler_ != nullptr) {
      name = "sampler";
      InputArchive own;
      own.load_from(static_cast<const char*>(sampler.const_data_ptr()),
                    static_cast<size_t>(sampler.numel()));
      sampler_->load(own);
    }
  } catch (...) {
    throw Error("its " + name +
                " does not match this program: " + reason(std::current_exception()));
  }
}

int64_t Checkpoint::load(const std::string& path, bool may_be_missing) {
  const Ranks ranks(group_, device());
  require_same_parts("load", ranks.gather(given() | kLoads));
  at::Tensor bytes;
  bool missing = false;
  std::string error;
  if (ranks.rank() == 0) error = error_of([&] { bytes = read_file(path, &missing); });
  missing = missing && may_be_missing;
  ranks.agree(missing ? std::string() : error);
  const int64_t length = ranks.gather(missing ? -1 : ranks.rank() == 0 ? bytes.numel() : 0)[0];
  if (length < 0) return 0;
  bytes = ranks.broadcast(bytes, length, 0);
  int64_t step = 0;
  error = error_of([&] { read(path, bytes, &step); });
  ranks.agree(error.empty() ? error : quoted(path) + " cannot be loaded: " + error);
  return step;
}

int64_t Checkpoint::load(const std::string& path) { return load(path, /*may_be_missing=*/false); }

int64_t Checkpoint::resume(const std::string& path) { return load(path, /*may_be_missing=*/true); }

}  // namespace apex::parallel
