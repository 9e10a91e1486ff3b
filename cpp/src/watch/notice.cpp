// SPDX-License-Identifier: BSD-3-Clause
#include "watch/notice.h"

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include <apex/parallel/stall_report.h>

#include "standard_error.h"
#include "watch/forced_unwind.h"

namespace apex::parallel {

namespace {

using Callback = std::function<void(const std::string&)>;

/// Never destroyed, since threads may outlive main().
struct Slot {
  std::mutex mutex;
  std::shared_ptr<const Callback> callback;
};

Slot& slot() {
  static auto* const instance = new Slot;
  return *instance;
}

}  // namespace

void on_notice(Callback callback) {
  auto next = callback ? std::make_shared<const Callback>(std::move(callback)) : nullptr;
  const std::lock_guard<std::mutex> lock(slot().mutex);
  slot().callback.swap(next);
}

void notify(const std::string& text) {
  write_line_to_stderr("apex: " + text);
  std::shared_ptr<const Callback> callback;
  {
    const std::lock_guard<std::mutex> lock(slot().mutex);
    callback = slot().callback;
  }
  if (!callback) return;
  try {
    (*callback)(text);
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    // The text was written to stderr already.
  }
}

}  // namespace apex::parallel
