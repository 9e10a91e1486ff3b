// SPDX-License-Identifier: BSD-3-Clause
#include "comm/announcer.h"

#include <memory>
#include <mutex>
#include <utility>

namespace apex::parallel {

namespace {

using Announce = std::function<void(int64_t)>;

struct Announcer {
  std::mutex mutex;  ///< guards the rest; not held during announcements
  const void* owner = nullptr;
  std::shared_ptr<const Announce> announce;
};

Announcer& announcer() {
  static auto* const instance = new Announcer;  // never destroyed: threads may outlive main()
  return *instance;
}

std::shared_ptr<const Announce> present() {
  const std::lock_guard<std::mutex> lock(announcer().mutex);
  return announcer().announce;
}

}  // namespace

void set_announcer(const void* owner, Announce announce) {
  const std::lock_guard<std::mutex> lock(announcer().mutex);
  announcer().owner = owner;
  announcer().announce = std::make_shared<const Announce>(std::move(announce));
}

void clear_announcer(const void* owner) {
  const std::lock_guard<std::mutex> lock(announcer().mutex);
  if (announcer().owner == owner) announcer().announce.reset();
}

void announce_collective(int64_t argument) {
  if (const auto announce = present()) (*announce)(argument);
}

bool announces_collectives() { return present() != nullptr; }

}  // namespace apex::parallel
