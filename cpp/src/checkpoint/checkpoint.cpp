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

#include <apex/amp/loss_scaler.h>
#include <apex/distributed/process_group.h>
#include <apex/error.h>
#include <apex/parallel/model_sync.h>

#include "comm/error_text.h"
#include "plain_text.h"

namespace apex::parallel {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kFormat = "apex::parallel::Checkpoint 3";
constexpr const char* kWhat = "a Checkpoint";

std::string quoted(const std::string& path) { return "the checkpoint '" + path + "'"; }

/// The first line of the message of the exception that `call` throws; empty if it returns.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
    return {};
  } catch (...) {
    const std::string text = message_of(std::current_exception());
    return text.substr(0, text.find('\n'));
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

/// If any rank has an error, throws that of the first such rank on every rank.
void agree(const Group& group, const std::string& error) {
  const int64_t ranks = group ? group->getSize() : 1;
  at::Tensor lengths = at::zeros({ranks}, at::kLong);
  lengths[group ? group->getRank() : 0] = static_cast<int64_t>(error.size());
  if (group) {
    lengths = lengths.to(at::kDouble).to(control_device(group, at::kCPU));
    all_reduce_coalesced({lengths}, group, 1.0, kWhat);
    lengths = lengths.cpu();
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (lengths[rank].item<double>() == 0) continue;
    throw Error("rank " + std::to_string(rank) + ": " +
                (group ? broadcast_text(error, group, rank, kWhat) : error));
  }
}

void require(bool good) {
  if (!good) throw Error(std::generic_category().message(errno));
}

/// A file that appears under its name once it is complete and synced to disk, or not at all.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path) : path_(std::move(path)), temporary_(path_ + ".part") {
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    require(file_ >= 0);
  }
  ~AtomicFile() {
    if (file_ >= 0) ::close(file_);
    ::unlink(temporary_.c_str());  // fails after commit()
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size) {
    const char* next = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t written = ::write(file_, next, size);
      require(written >= 0 || errno == EINTR);
      if (written <= 0) continue;
      next += written;
      size -= static_cast<size_t>(written);
    }
  }

  void commit() {
    require(::fsync(file_) == 0 || errno == EINVAL);  // EINVAL: a file system without fsync
    require(std::rename(temporary_.c_str(), path_.c_str()) == 0);
    // Sync the new directory entry as well.
    const std::string folder = std::filesystem::path(path_).parent_path().string();
    const int opened = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_CLOEXEC);
    if (opened < 0) return;  // the folder may be writable but not readable
    ::fsync(opened);
    ::close(opened);
  }

 private:
  std::string path_, temporary_;
  int file_ = -1;
};

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

Checkpoint& Checkpoint::optimizer(torch::optim::Optimizer& optimizer) {
  parts_.push_back({"optimizer" + std::to_string(optimizers_++),
                    [&optimizer](OutputArchive& archive) { optimizer.save(archive); },
                    [&optimizer](InputArchive& archive) { optimizer.load(archive); }});
  return *this;
}

Checkpoint& Checkpoint::scaler(amp::LossScaler& scaler) {
  parts_.push_back({"scaler", [&scaler](OutputArchive& archive) { scaler.save(archive); },
                    [&scaler](InputArchive& archive) { scaler.load(archive); }});
  return *this;
}

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
  AtomicFile file(path);
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
  std::string error;
  if (!group || group->getRank() == 0) error = error_of([&] { write(path, step); });
  agree(group, error.empty() ? error : quoted(path) + " cannot be written: " + error);
}

int64_t Checkpoint::load(const std::string& path) {
  const Group group = ranks_of(group_);
  std::string bytes, error;
  if (!group || group->getRank() == 0) error = error_of([&] { bytes = read_file(path); });
  agree(group, error.empty() ? error : quoted(path) + " cannot be read: " + error);
  bytes = of_first(group, bytes);
  int64_t step = 0;
  error = error_of([&] { step = read(bytes); });
  agree(group, error.empty() ? error : quoted(path) + " cannot be loaded: " + error);
  return step;
}

int64_t Checkpoint::resume(const std::string& path) {
  const std::string found = std::filesystem::exists(path) ? "yes" : "no";
  return of_first(ranks_of(group_), found) == "yes" ? load(path) : 0;
}

}  // namespace apex::parallel
