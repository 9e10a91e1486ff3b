// SPDX-License-Identifier: BSD-3-Clause
// Conversion of C++ modules to SyncBatchNorm.

#include <apex/error.h>
#include <apex/parallel/sync_batch_norm.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "batch_norm/sync_batch_norm_ops.h"

namespace apex::parallel {
namespace {

using torch::nn::AnyModule;

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw InvalidArgument("cannot replace module '" + path + "': " + why);
}

class Conversion {
 public:
  Conversion(c10::intrusive_ptr<c10d::ProcessGroup> group, bool channel_last)
      : group_(std::move(group)), channel_last_(channel_last) {}

  /// Makes all replacements, and throws all errors, before the first change to the model.
  void run(torch::nn::Module& model) {
    if (is_batch_norm(model)) {
      throw InvalidArgument(
          "the model itself would be replaced, which is not possible in place; put it into a "
          "torch::nn::Sequential.");
    }
    prepare(model, "");
    exchange(model);
  }

 private:
  static bool is_batch_norm(const torch::nn::Module& module) {
    return module.as<torch::nn::BatchNorm1dImpl>() != nullptr ||
           module.as<torch::nn::BatchNorm2dImpl>() != nullptr ||
           module.as<torch::nn::BatchNorm3dImpl>() != nullptr;
  }

  static bool is_container(const torch::nn::Module& module) {
    return module.as<torch::nn::SequentialImpl>() != nullptr ||
           module.as<torch::nn::ModuleListImpl>() != nullptr ||
           module.as<torch::nn::ModuleDictImpl>() != nullptr;
  }

  template <typename BatchNormImpl>
  AnyModule to_sync(const torch::nn::Module& module) const {
    const auto& from = *module.as<BatchNormImpl>();
    SyncBatchNormOptions options(from.options.num_features());
    options.eps(from.options.eps())
        .momentum(from.options.momentum())
        .channel_last(channel_last_)
        .process_group(group_);
    auto result = std::make_shared<SyncBatchNormImpl>(std::move(options), from.weight, from.bias,
                                                      from.running_mean, from.running_var,
                                                      from.num_batches_tracked);
    result->train(from.is_training());
    return AnyModule(std::move(result));
  }

  AnyModule replacement(const torch::nn::Module& module, const std::string& path) const {
    const std::type_info& type = typeid(module);
    if (type == typeid(torch::nn::BatchNorm1dImpl)) {
      return to_sync<torch::nn::BatchNorm1dImpl>(module);
    }
    if (type == typeid(torch::nn::BatchNorm2dImpl)) {
      return to_sync<torch::nn::BatchNorm2dImpl>(module);
    }
    if (type == typeid(torch::nn::BatchNorm3dImpl)) {
      return to_sync<torch::nn::BatchNorm3dImpl>(module);
    }
    refuse(path,
           "its class is derived from a batch norm, and conversion would lose its own behaviour; "
           "replace it manually, or by a torch::nn::BatchNorm.");
  }

  void prepare(const torch::nn::Module& parent, const std::string& path) {
    if (!visited_.insert(&parent).second) {
      return;
    }
    for (const auto& child : parent.named_children()) {
      const std::string name = path.empty() ? child.key() : path + "." + child.key();
      if (!is_batch_norm(*child.value())) {
        prepare(*child.value(), name);
      } else if (!is_container(parent)) {
        refuse(name,
               "its parent module holds it as a typed member; declare that member as "
               "apex::parallel::SyncBatchNorm, or as a torch::nn::Sequential with the BatchNorm in "
               "it.");
      } else if (made_.count(child.value().get()) == 0) {
        made_.emplace(child.value().get(), replacement(*child.value(), name));
      }
    }
  }

  void exchange(torch::nn::Module& parent) {
    if (visited_.erase(&parent) == 0) {
      return;
    }
    const auto children = parent.named_children();
    if (auto* sequential = parent.as<torch::nn::SequentialImpl>()) {
      for (AnyModule& element : *sequential) {
        if (const AnyModule* made = made_for(*element.ptr())) {
          element = *made;
        }
      }
    } else if (auto* list = parent.as<torch::nn::ModuleListImpl>()) {
      for (std::shared_ptr<torch::nn::Module>& element : *list) {
        if (const AnyModule* made = made_for(*element)) {
          element = made->ptr();
        }
      }
    } else if (auto* dict = parent.as<torch::nn::ModuleDictImpl>()) {
      for (auto& item : *dict) {
        if (const AnyModule* made = made_for(*item.value())) {
          item.value() = made->ptr();
        }
      }
    }
    for (const auto& child : children) {
      if (const AnyModule* made = made_for(*child.value())) {
        parent.replace_module(child.key(), made->ptr());
      } else {
        exchange(*child.value());
      }
    }
  }

  const AnyModule* made_for(const torch::nn::Module& module) const {
    const auto found = made_.find(&module);
    return found == made_.end() ? nullptr : &found->second;
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const bool channel_last_;
  std::unordered_set<const torch::nn::Module*> visited_;
  std::unordered_map<const torch::nn::Module*, AnyModule> made_;
};

}  // namespace

void convert_sync_batch_norm(torch::nn::Module& model,
                             const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                             bool channel_last) {
  Conversion(group, channel_last).run(model);
  name_layers(model);
}

}  // namespace apex::parallel
