// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize
namespace apex::amp {
class LossScaler;
}

namespace apex::parallel {

/// Saves and restores a training run in one file: model, optimizers, loss scaler, and the
/// number of steps.
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
/// block the host. Only rank 0 reads and writes the file, an archive of torch::save(). An error on
/// one rank is thrown on every rank. The parts must outlive this object. Not thread safe.
///
/// Not in the file: random states, learning rate schedulers, and positions in the data. Save at the
/// end of an epoch, and set seeds, learning rates and samplers by the step or the epoch.
class APEX_API Checkpoint {
 public:
  /// The model, on one device: a module, a holder, a pointer, or a DistributedDataParallel.
  /// @throws InvalidArgument for a holder or a pointer that is null.
  explicit Checkpoint(torch::nn::Module& model) : model_(model) {}
  template <typename Model, typename = decltype(static_cast<torch::nn::Module&>(
                                *std::declval<Model&>().operator->()))>
  explicit Checkpoint(Model& model) : Checkpoint(module_in(model)) {}

  /// Adds a part. Several optimizers are identified by their order.
  Checkpoint& optimizer(torch::optim::Optimizer& optimizer);
  Checkpoint& scaler(amp::LossScaler& scaler);
  /// Default, also for null: the default group, or this process alone without a default group.
  Checkpoint& process_group(c10::intrusive_ptr<c10d::ProcessGroup> group);

  /// Writes all parts and `step`. The write is atomic: rank 0 writes PATH.part, syncs it to disk,
  /// and renames it. If that fails, an existing file is unchanged.
  /// @throws apex::Error on every rank, naming the file and the cause; CommunicationError.
  void save(const std::string& path, int64_t step);

  /// Reads all parts from rank 0's file into the ranks' objects and returns the step.
  /// @throws apex::Error on every rank, naming the file, with nothing changed: if it cannot be
  ///         read, is truncated or not a checkpoint, or lacks a part, or if a parameter has another
  ///         shape or dtype. After another mismatch the parts must not be used. CommunicationError.
  int64_t load(const std::string& path);

  /// Like load(), but returns 0 with nothing changed if the file does not exist on rank 0.
  int64_t resume(const std::string& path);

 private:
  struct Part {
    std::string name;
    std::function<void(torch::serialize::OutputArchive&)> save;
    std::function<void(torch::serialize::InputArchive&)> load;
  };

  template <typename Model>
  static torch::nn::Module& module_in(Model& model) {
    if constexpr (std::is_constructible_v<bool, Model&>) {
      if (!static_cast<bool>(model)) throw_null_model();
    }
    return *model.operator->();
  }
  template <typename T>
  Checkpoint& add(std::string name, T& part);
  [[noreturn]] static void throw_null_model();
  void write(const std::string& path, int64_t step) const;
  int64_t read(const std::string& bytes) const;

  torch::nn::Module& model_;
  std::vector<Part> parts_;
  int optimizers_ = 0;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace apex::parallel
