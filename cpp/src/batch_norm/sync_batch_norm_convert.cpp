// SPDX-License-Identifier: BSD-3-Clause
// Conversion of C++ modules to SyncBatchNorm and back.

#include <apex/error.h>
#include <apex/parallel/sync_batch_norm.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace apex::parallel {
namespace {

using torch::nn::AnyModule;

template <typename BatchNormImpl>
std::shared_ptr<SyncBatchNormImpl> to_sync(const BatchNormImpl& module, int dimensions,
                                           const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                           bool channel_last) {
  SyncBatchNormOptions options(module.options.num_features());
  options.eps(module.options.eps())
      .momentum(module.options.momentum())
      .channel_last(channel_last)
      .process_group(group);
  auto result = std::make_shared<SyncBatchNormImpl>(std::move(options), module.weight, module.bias,
                                                    module.running_mean, module.running_var,
                                                    module.num_batches_tracked);
  result->converted_from = dimensions;
  result->train(module.is_training());
  return result;
}

/// A BatchNorm that shares the tensors of `module`. BatchNorm has no constructor for that. But its
/// members and named_parameters() are handles of the same tensors, so set_data() changes both.
template <typename BatchNormImpl>
std::shared_ptr<BatchNormImpl> to_plain(const SyncBatchNormImpl& module) {
  torch::nn::BatchNormOptions options(module.options.num_features());
  options.eps(module.options.eps())
      .momentum(module.options.momentum())
      .affine(module.options.affine())
      .track_running_stats(module.options.track_running_stats());
  auto result = std::make_shared<BatchNormImpl>(options);
  const auto take = [](at::Tensor& to, const at::Tensor& from) {
    if (from.defined()) {
      to.set_data(from.detach());
      to.set_requires_grad(from.requires_grad());
    }
  };
  take(result->weight, module.weight);
  take(result->bias, module.bias);
  take(result->running_mean, module.running_mean);
  take(result->running_var, module.running_var);
  take(result->num_batches_tracked, module.num_batches_tracked);
  result->train(module.is_training());
  return result;
}

bool is_batch_norm(const torch::nn::Module& module) {
  return module.as<torch::nn::BatchNorm1dImpl>() != nullptr ||
         module.as<torch::nn::BatchNorm2dImpl>() != nullptr ||
         module.as<torch::nn::BatchNorm3dImpl>() != nullptr;
}

bool is_sync_batch_norm(const torch::nn::Module& module) {
  return module.as<SyncBatchNormImpl>() != nullptr;
}

/// Which modules to replace, how to make the replacement, and the remedy for the error message.
struct Replacement {
  bool (*applies)(const torch::nn::Module&);
  /// (module to replace, its full name) -> its replacement.
  std::function<AnyModule(const torch::nn::Module&, const std::string&)> make;
  const char* remedy;
};

std::string joined(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

[[noreturn]] void refuse(const std::string& path, const std::string& why, const char* remedy) {
  throw InvalidArgument("cannot replace module '" + path + "': " + why + "; " + remedy);
}

// ---- in place ----------------------------------------------------------------------------------

class ReplaceInPlace {
 public:
  explicit ReplaceInPlace(const Replacement& replacement) : replacement_(replacement) {}

  /// Makes all replacements, and throws all errors, before the first change to the model.
  void run(torch::nn::Module& model) {
    if (replacement_.applies(model)) {
      throw InvalidArgument(
          "the model itself would be replaced, which is not possible in place; put it into a "
          "torch::nn::Sequential.");
    }
    prepare(model, "");
    exchange(model);
  }

 private:
  static bool is_container(const torch::nn::Module& module) {
    return module.as<torch::nn::SequentialImpl>() != nullptr ||
           module.as<torch::nn::ModuleListImpl>() != nullptr ||
           module.as<torch::nn::ModuleDictImpl>() != nullptr;
  }

  void prepare(const torch::nn::Module& parent, const std::string& path) {
    if (!visited_.insert(&parent).second) {
      return;
    }
    for (const auto& child : parent.named_children()) {
      const std::string name = joined(path, child.key());
      if (!replacement_.applies(*child.value())) {
        prepare(*child.value(), name);
      } else if (!is_container(parent)) {
        refuse(name, "its parent module holds it as a typed member", replacement_.remedy);
      } else if (made_.count(child.value().get()) == 0) {
        made_.emplace(child.value().get(), replacement_.make(*child.value(), name));
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

  const Replacement& replacement_;
  std::unordered_set<const torch::nn::Module*> visited_;
  std::unordered_map<const torch::nn::Module*, AnyModule> made_;
};

// ---- into a new Sequential ---------------------------------------------------------------------

/// A new Sequential with replaced elements. It shares the other elements with `model`. (libtorch
/// allows no Sequential in a Sequential, because an AnyModule cannot hold a template forward.)
torch::nn::Sequential rebuild(const torch::nn::Sequential& model, const Replacement& replacement) {
  if (model.is_empty()) {
    throw InvalidArgument("the model is null; construct it first, e.g. torch::nn::Sequential().");
  }
  torch::nn::Sequential result;
  result->train(model->is_training());  // while it is empty: train() also changes the elements
  const auto children = model->named_children();
  size_t index = 0;
  for (auto element = model->begin(); element != model->end(); ++element, ++index) {
    const std::string name = children[index].key();
    const std::shared_ptr<torch::nn::Module> module = element->ptr();
    if (replacement.applies(*module)) {
      result->push_back(name, replacement.make(*module, name));
      continue;
    }
    for (const auto& inner : module->named_modules(name, /*include_self=*/false)) {
      if (replacement.applies(*inner.value())) {
        refuse(inner.key(), "its parent module is shared with the new Sequential",
               "convert in place (pass *model), or declare that member with another type.");
      }
    }
    result->push_back(name, *element);
  }
  return result;
}

/// Throws if a user has derived the class of `module` from `Known`. A replacement would lose the
/// behaviour of that class.
template <typename... Known>
void refuse_derived(const torch::nn::Module& module, const std::string& path) {
  const std::type_info& type = typeid(module);
  if (!((type == typeid(Known)) || ...)) {
    refuse(path,
           "its class is derived from a batch norm, and conversion would lose its own behaviour",
           "replace it manually, or by a torch::nn::BatchNorm.");
  }
}

Replacement to_sync_batch_norm(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                               bool channel_last) {
  const auto make = [group, channel_last](const torch::nn::Module& module,
                                          const std::string& path) {
    refuse_derived<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl,
                   torch::nn::BatchNorm3dImpl>(module, path);
    if (const auto* one = module.as<torch::nn::BatchNorm1dImpl>()) {
      return AnyModule(to_sync(*one, 1, group, channel_last));
    }
    if (const auto* two = module.as<torch::nn::BatchNorm2dImpl>()) {
      return AnyModule(to_sync(*two, 2, group, channel_last));
    }
    return AnyModule(to_sync(*module.as<torch::nn::BatchNorm3dImpl>(), 3, group, channel_last));
  };
  return {is_batch_norm, make,
          "declare that member as apex::parallel::SyncBatchNorm, or as a torch::nn::Sequential "
          "with the BatchNorm in it."};
}

Replacement to_batch_norm() {
  const auto make = [](const torch::nn::Module& module, const std::string& path) {
    refuse_derived<SyncBatchNormImpl>(module, path);
    const auto& sync = *module.as<SyncBatchNormImpl>();
    if (sync.options.fuse_relu()) {
      refuse(path, "it fuses a ReLU, which BatchNorm does not support",
             "add the ReLU to the model and set fuse_relu to false.");
    }
    if (!sync.converted_from.has_value()) {
      refuse(path, "it was not converted from a BatchNorm, so its dimensions are not known",
             "replace it manually.");
    }
    switch (*sync.converted_from) {
      case 1:
        return AnyModule(to_plain<torch::nn::BatchNorm1dImpl>(sync));
      case 2:
        return AnyModule(to_plain<torch::nn::BatchNorm2dImpl>(sync));
      default:
        return AnyModule(to_plain<torch::nn::BatchNorm3dImpl>(sync));
    }
  };
  return {is_sync_batch_norm, make,
          "it was not converted; declare that member as torch::nn::BatchNorm."};
}

}  // namespace

void convert_sync_batch_norm(torch::nn::Module& model,
                             const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                             bool channel_last) {
  const Replacement replacement = to_sync_batch_norm(group, channel_last);
  ReplaceInPlace(replacement).run(model);
  name_layers(model);
}

torch::nn::Sequential convert_sync_batch_norm(const torch::nn::Sequential& model,
                                              const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                              bool channel_last) {
  torch::nn::Sequential result = rebuild(model, to_sync_batch_norm(group, channel_last));
  name_layers(*result);
  return result;
}

void revert_sync_batch_norm(torch::nn::Module& model) {
  const Replacement replacement = to_batch_norm();
  ReplaceInPlace(replacement).run(model);
}

torch::nn::Sequential revert_sync_batch_norm(const torch::nn::Sequential& model) {
  return rebuild(model, to_batch_norm());
}

}  // namespace apex::parallel
