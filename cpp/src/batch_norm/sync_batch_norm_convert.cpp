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
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "batch_norm/sync_batch_norm_ops.h"

namespace apex::parallel {
namespace {

using torch::nn::AnyModule;
using torch::nn::Module;

/// If `module` is one of torch's batch norms, or of a class derived from one, calls f with it as
/// the former and returns true.
template <typename F>
bool visit_batch_norm(const Module& module, F&& f) {
  const auto visit = [&](const auto* norm) {
    if (norm != nullptr) f(*norm);
    return norm != nullptr;
  };
  return visit(module.as<torch::nn::BatchNorm1dImpl>()) ||
         visit(module.as<torch::nn::BatchNorm2dImpl>()) ||
         visit(module.as<torch::nn::BatchNorm3dImpl>());
}

bool is_container(const Module& module) {
  return module.as<torch::nn::SequentialImpl>() != nullptr ||
         module.as<torch::nn::ModuleListImpl>() != nullptr ||
         module.as<torch::nn::ModuleDictImpl>() != nullptr;
}

/// Calls f(module, path) for the model and all modules in it.
template <typename F>
void for_each_module(Module& model, F&& f) {
  f(model, std::string());
  for (const auto& item : model.named_modules("", /*include_self=*/false))
    f(*item.value(), item.key());
}

/// The replacements by what they replace.
using Made = std::unordered_map<const Module*, AnyModule>;

void put_into(Module& parent, const Made& made) {
  const auto of = [&](const Module& module) {
    const auto found = made.find(&module);
    return found == made.end() ? nullptr : &found->second;
  };
  if (auto* sequential = parent.as<torch::nn::SequentialImpl>()) {
    for (AnyModule& element : *sequential) {
      if (const AnyModule* sync = of(*element.ptr())) element = *sync;
    }
  } else if (auto* list = parent.as<torch::nn::ModuleListImpl>()) {
    for (std::shared_ptr<Module>& element : *list) {
      if (const AnyModule* sync = of(*element)) element = sync->ptr();
    }
  } else if (auto* dict = parent.as<torch::nn::ModuleDictImpl>()) {
    for (auto& item : *dict) {
      if (const AnyModule* sync = of(*item.value())) item.value() = sync->ptr();
    }
  }
  for (const auto& child : parent.named_children()) {
    if (const AnyModule* sync = of(*child.value())) parent.replace_module(child.key(), sync->ptr());
  }
}

}  // namespace

void convert_sync_batch_norm(Module& model, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                             bool channel_last) {
  if (visit_batch_norm(model, [](const auto&) {})) {
    throw InvalidArgument(
        "the model itself would be replaced, which is not possible in place; put it into a "
        "torch::nn::Sequential.");
  }
  // All replacements are made, and all errors thrown, before the first change to the model.
  Made made;
  for_each_module(model, [&](const Module& parent, const std::string& path) {
    for (const auto& child : parent.named_children()) {
      const std::string name = path.empty() ? child.key() : path + "." + child.key();
      visit_batch_norm(*child.value(), [&](const auto& from) {
        if (!is_container(parent)) {
          throw InvalidArgument(
              "cannot replace module '" + name +
              "': its parent module holds it as a typed member; declare that member as "
              "apex::parallel::SyncBatchNorm, or as a torch::nn::Sequential with the BatchNorm "
              "in it.");
        }
        if (typeid(from) != typeid(std::decay_t<decltype(from)>)) {
          throw InvalidArgument(
              "cannot replace module '" + name +
              "': its class is derived from a batch norm, and conversion would lose its own "
              "behaviour; replace it manually, or by a torch::nn::BatchNorm.");
        }
        if (made.count(&from) != 0) return;
        SyncBatchNormOptions options(from.options.num_features());
        options.eps(from.options.eps())
            .momentum(from.options.momentum())
            .channel_last(channel_last)
            .process_group(group);
        auto sync = std::make_shared<SyncBatchNormImpl>(std::move(options), from.weight, from.bias,
                                                        from.running_mean, from.running_var,
                                                        from.num_batches_tracked);
        sync->train(from.is_training());
        made.emplace(&from, AnyModule(std::move(sync)));
      });
    }
  });
  for_each_module(model, [&](Module& parent, const std::string&) { put_into(parent, made); });
  name_layers(model);
}

}  // namespace apex::parallel
