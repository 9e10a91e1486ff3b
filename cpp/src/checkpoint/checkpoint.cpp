// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/checkpoint.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <apex/amp.h>
#include <apex/distributed.h>
#include <apex/error.h>
#include <apex/parallel/detail/model_sync.h>

#include "error_text.h"
#include "plain_text.h"

namespace apex::parallel {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kFormat = "apex::parallel::Checkpoint 4";
constexpr const char* kWhat = "a Checkpoint";

std::string cannot_be(const char* what, const std::string& path) {
  return "the checkpoint '" + path + "' cannot be " + what;
}

bool is_first(const Group& group) { return !group || group->getRank() == 0; }

/// The first line of the message of the exception that `call` throws; empty if it returns.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
    return {};
  } catch (...) {
    return first_line_of(std::current_exception());
  }
}

/// `group`, or the default group if there is one.
Group ranks_of(const Group& group) {
  if (group || !apex::distributed::is_initialized()) return group;
  return apex::distributed::get_default_group();
}

/// `text` of rank 0, on every rank.
std::string of_first(const Group& group, const std::string& text) {
  return group ? broadcast_text(text, group, 0, kWhat) : text;
}

/// Calls `call`. If that throws on any rank, throws the error of the first such rank on every rank.
template <typename Call>
void on_every_rank(const Group& group, const std::string& failure, const Call& call) {
  const std::string error = error_of(call);
  at::Tensor failed = at::full({1}, !error.empty(), at::kByte);
  if (group) {
    failed = apex::distributed::all_gather(failed.to(control_device(group, at::kCPU)), group).cpu();
  }
  for (int64_t rank = 0; rank < failed.numel(); ++rank) {
    if (!failed.flatten()[rank].item<bool>()) continue;
    throw Error("rank " + std::to_string(rank) + ": " + failure + ": " +
                (group ? broadcast_text(error, group, rank, kWhat) : error));
  }
}

void require(bool good) {
  if (!good) throw Error(std::generic_category().message(errno));
}

/// Syncs a file or a folder to disk.
bool sync(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool synced = ::fsync(file) == 0 || errno == EINVAL;  // EINVAL: a file system without fsync
  ::close(file);
  return synced;
}

/// Replaces a file by one that appears under its name once it is complete and synced, or not at
/// all.
void replace_file(const std::string& path, const std::string& bytes) {
  const std::string temporary = path + ".part";
  const std::string error = error_of([&] {
    std::ofstream file(temporary, std::ios::binary);
    require(file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush().good());
    require(sync(temporary));
    require(std::rename(temporary.c_str(), path.c_str()) == 0);
  });
  if (!error.empty()) {
    ::unlink(temporary.c_str());
    throw Error(error);
  }
  const std::string folder = std::filesystem::path(path).parent_path().string();
  sync(folder.empty() ? "." : folder);  // the new entry; fails if the folder cannot be read
}

std::string read_file(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  require(file.is_open());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
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
      if (form_of(found) == form_of(item.value())) continue;
      throw Error("'" + path + item.key() + "' has " + form_of(item.value()) +
                  " in the model, but " + form_of(found) + " in the file");
    }
  };
  compare(module.named_parameters(/*recurse=*/false), false);
  compare(module.named_buffers(/*recurse=*/false), true);
  for (const auto& child : module.named_children()) {
    InputArchive inner;
    if (archive.try_read(child.key(), inner))
      require_same_forms(*child.value(), inner, path + child.key() + ".");
  }
}

}  // namespace

template <typename T>
Checkpoint& Checkpoint::add(std::string name, T& part) {
  parts_.push_back({std::move(name), [&part](OutputArchive& archive) { part.save(archive); },
                    [&part](InputArchive& archive) { part.load(archive); }});
  return *this;
}

Checkpoint& Checkpoint::optimizer(torch::optim::Optimizer& optimizer) {
  return add("optimizer" + std::to_string(optimizers_++), optimizer);
}

Checkpoint& Checkpoint::scaler(amp::LossScaler& scaler) { return add("scaler", scaler); }

Checkpoint& Checkpoint::process_group(Group group) {
  group_ = std::move(group);
  return *this;
}

void Checkpoint::throw_null_model() {
  throw InvalidArgument("Checkpoint: the model is null; construct it first, e.g. Net()");
}

void Checkpoint::write(const std::string& path, int64_t step) const {
  OutputArchive archive;
  archive.write("format", c10::IValue(std::string(kFormat)));
  archive.write("step", c10::IValue(step));
  const auto nested = [&](const std::string& name, const auto& save) {
    OutputArchive inner(archive.compilation_unit());
    save(inner);
    archive.write(name, inner);
  };
  nested("model", [&](OutputArchive& inner) { model_.save(inner); });
  for (const Part& part : parts_) nested(part.name, part.save);
  std::string bytes;
  archive.save_to([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  replace_file(path, bytes);
}

int64_t Checkpoint::read(const std::string& bytes) const {
  const std::vector<at::Tensor> parameters = model_.parameters();
  InputArchive archive;
  c10::IValue value;
  try {
    archive.load_from(bytes.data(), bytes.size(),
                      parameters.empty() ? at::Device(at::kCPU) : parameters.front().device());
  } catch (...) {
    throw Error("it is truncated, or is not a checkpoint");
  }
  if (!archive.try_read("format", value) || !value.isString() || value.toStringRef() != kFormat)
    throw Error("it was not written by this version of apex::parallel::Checkpoint");
  // Check everything that can be checked before anything is changed.
  InputArchive model;
  archive.read("model", model);
  require_same_forms(model_, model, "");
  std::vector<InputArchive> inner(parts_.size());
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (!archive.try_read(parts_[i].name, inner[i])) throw Error("it has no " + parts_[i].name);
  }
  // Load optimizers first: pending updates are applied then, and they belong to the old model.
  for (size_t i = 0; i < parts_.size(); ++i) parts_[i].load(inner[i]);
  model_.load(model);
  archive.read("step", value);
  return value.toInt();
}

void Checkpoint::save(const std::string& path, int64_t step) {
  const Group group = ranks_of(group_);
  on_every_rank(group, cannot_be("written", path), [&] {
    if (is_first(group)) write(path, step);
  });
}

int64_t Checkpoint::load(const std::string& path) {
  const Group group = ranks_of(group_);
  std::string bytes;
  on_every_rank(group, cannot_be("read", path), [&] {
    if (is_first(group)) bytes = read_file(path);
  });
  bytes = of_first(group, bytes);
  int64_t step = 0;
  on_every_rank(group, cannot_be("loaded", path), [&] { step = read(bytes); });
  return step;
}

int64_t Checkpoint::resume(const std::string& path) {
  const std::string found = std::filesystem::exists(path) ? "yes" : "no";
  return of_first(ranks_of(group_), found) == "yes" ? load(path) : 0;
}

}  // namespace apex::parallel
