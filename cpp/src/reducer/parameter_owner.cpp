// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/parameter_owner.h"

#include <mutex>
#include <unordered_map>

namespace apex::parallel {

namespace {

// Guards registry(). Never destroyed: reducers may outlive static objects.
std::mutex& registry_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::unordered_map<const void*, std::weak_ptr<ParameterOwner>>& registry() {
  static auto* map = new std::unordered_map<const void*, std::weak_ptr<ParameterOwner>>;
  return *map;
}

}  // namespace

std::shared_ptr<ParameterOwner> owner_of(const at::Tensor& parameter) {
  const void* const key = parameter.unsafeGetTensorImpl();
  const std::lock_guard<std::mutex> lock(registry_mutex());
  std::weak_ptr<ParameterOwner>& entry = registry()[key];
  if (auto owner = entry.lock()) return owner;
  const std::shared_ptr<ParameterOwner> owner(
      new ParameterOwner(nullptr), [key](ParameterOwner* last) {
        delete last;
        const std::lock_guard<std::mutex> inner(registry_mutex());
        const auto found = registry().find(key);
        if (found != registry().end() && found->second.expired()) registry().erase(found);
      });
  entry = owner;
  return owner;
}

}  // namespace apex::parallel
