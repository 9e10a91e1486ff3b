// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/data/samplers/base.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace torch::optim {
class Optimizer;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize
namespace apex::amp {
class LossScaler;
}

namespace apex::parallel {

class OverlappedOptimizer;

/// All that a training run needs to go on after it was stopped: model, optimizers, loss scaler,
/// samplers and the number of steps, in one file.
///
///     apex::parallel::Checkpoint checkpoint(model);
///     checkpoint.optimizer(optimizer).scaler(scaler);
///     int64_t step = checkpoint.resume("run.ckpt");  // 0 when the run begins
///     for (; step < 1000; ++step) {
///       if (step % 100 == 0) checkpoint.save("run.ckpt", step);
///       train_one(step);
///     }
///
/// save(), load() and resume() are collective: every rank calls them with the same parts. They
/// block the host. Rank 0 alone reads and writes the file, so it needs no file system that the
/// ranks share; samplers are saved for each rank. An error on one rank is an error on every rank.
/// The parts have to outlive this object. Not thread safe.
///
/// The file is an archive of torch::save(); its parts are under "model", "optimizer0", "scaler" and
/// "sampler0" (of rank 0, as bytes), "step" and "world_size"; "optimizer0_is" says of which class.
class APEX_API Checkpoint {
 public:
  /// The model, on one device: a module, its holder, a pointer to it, or DistributedDataParallel
  /// around it.
  /// @throws InvalidArgument for a holder or a pointer that is null.
  explicit Checkpoint(torch::nn::Module& model) : model_(model) {}
  template <typename Model, typename = decltype(static_cast<torch::nn::Module&>(
                                *std::declval<Model&>().operator->()))>
  explicit Checkpoint(Model& model) : Checkpoint(module_in(model)) {}

  /// Adds a part. Several optimizers are told apart by their order.
  /// @throws InvalidArgument for a second scaler.
  Checkpoint& optimizer(torch::optim::Optimizer& optimizer);
  Checkpoint& optimizer(OverlappedOptimizer& optimizer);
  Checkpoint& scaler(amp::LossScaler& scaler);
  /// A sampler of libtorch's data loader, e.g. torch::data::samplers::DistributedRandomSampler. It
  /// can be loaded by as many ranks as have saved it.
  Checkpoint& sampler(torch::data::samplers::Sampler<>& sampler);
  /// Null, and without it: the default group; this process alone where there is none.
  Checkpoint& process_group(c10::intrusive_ptr<c10d::ProcessGroup> group);

  /// Writes all parts and `step`. The file is complete or not there: rank 0 writes another one in
  /// the same folder, waits until it is on the disk, and renames it. An older file of this name
  /// stays as it is if that fails, and keeps its permissions if not. A symbolic link is followed;
  /// anything else that is no file is refused. A process that is killed while it writes leaves
  /// .NAME.PID.part behind; a NAME too long for that is cut.
  /// @throws apex::Error on every rank, naming the file and the cause.
  /// @throws InvalidArgument on every rank for a negative step, and if the ranks have given
  ///         different parts (numbers of optimizers, a scaler, a sampler), or some are in load();
  ///         CommunicationError.
  void save(const std::string& path, int64_t step);

  /// Reads all parts from rank 0's file into the ranks' objects and returns the step. What the file
  /// has besides is passed over.
  /// @throws apex::Error on every rank, naming the file: if it cannot be read, is truncated or
  ///         something else, or lacks a part; if a parameter has another shape or dtype, or an
  ///         optimizer is of another class or has other numbers of parameters, before anything is
  ///         changed; if a part does not fit otherwise, after which the parts must not be used.
  /// @throws InvalidArgument on every rank, with nothing changed, if the ranks have given different
  ///         parts; CommunicationError.
  int64_t load(const std::string& path);

  /// load(), or 0, with nothing changed, if rank 0 has no such file.
  int64_t resume(const std::string& path);

 private:
  struct Part {
    std::string name;
    std::function<void(torch::serialize::OutputArchive&)> save;
    std::function<void(torch::serialize::InputArchive&)> load;
    const torch::optim::Optimizer* optimizer;  ///< whose class is compared, or null
  };

  template <typename Model>
  static torch::nn::Module& module_in(Model& model) {
    if constexpr (std::is_constructible_v<bool, Model&>) {
      if (!static_cast<bool>(model)) throw_null_model();
    }
    return *model.operator->();
  }
  [[noreturn]] static void throw_null_model();

  int64_t given() const;
  void write(const std::string& path, int64_t step, const std::vector<at::Tensor>& samplers) const;
  void read(const std::string& path, const at::Tensor& bytes, int64_t* step) const;
  int64_t load(const std::string& path, bool may_be_missing);
  at::Device device() const;

  torch::nn::Module& model_;
  std::vector<Part> parts_;
  torch::data::samplers::Sampler<>* sampler_ = nullptr;
  int optimizers_ = 0;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace apex::parallel
