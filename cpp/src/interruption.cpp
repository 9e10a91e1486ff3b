// SPDX-License-Identifier: BSD-3-Clause
#include "interruption.h"

#include <apex/error.h>

#include <mutex>
#include <utility>

namespace apex {

namespace {

struct Check {
  std::mutex mutex;  ///< guards function
  std::function<bool()> function;
};

Check& check() {
  static auto* const instance = new Check;  // never destroyed: other threads may outlive main()
  return *instance;
}

}  // namespace

void set_interruption_check(std::function<bool()> interrupted) {
  const std::lock_guard<std::mutex> lock(check().mutex);
  check().function = std::move(interrupted);
}

bool is_interrupted() {
  std::unique_lock<std::mutex> lock(check().mutex);
  const std::function<bool()> function = check().function;
  lock.unlock();
  return function && function();
}

}  // namespace apex
