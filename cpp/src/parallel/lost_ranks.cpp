#include "parallel/lost_ranks.h"

#include <chrono>
#include <map>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace apex::parallel {

namespace {

constexpr auto kPatience = std::chrono::seconds(5);
constexpr auto kFarewell = std::chrono::seconds(2);
constexpr auto kInterval = std::chrono::milliseconds(50);

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

/// What the ranks have written into the store; it may end before the answer is complete.
struct Reports {
  std::map<int, std::string> steps;  // by rank: the backward in which it failed
  bool store_lost = false;           // the process that keeps the store ended meanwhile
};

// The survivors leave one after another, and with the one that keeps the store, as a rule rank 0, goes the
// store. So that rank waits a little for those that are still reading, and what the others have read when
// it ends counts all the same.
Reports collect_reports(const c10d::ProcessGroup& group, const std::string& mine) {
  Reports reports{{{group.getRank(), mine}}};
  const auto store = group.getStore();
  const std::string prefix = "apex/failure/" + group.getGroupName() + "/";
  const auto key = [&](int rank) { return prefix + std::to_string(rank); };
  const auto has_left = [&](int rank) { return prefix + "left/" + std::to_string(rank); };
  const auto until = std::chrono::steady_clock::now() + kPatience;
  try {
    store->set(key(group.getRank()), std::vector<uint8_t>(mine.begin(), mine.end()));
    while (static_cast<int>(reports.steps.size()) < group.getSize()) {
      for (int rank = 0; rank < group.getSize(); ++rank) {
        if (reports.steps.count(rank) != 0 || !store->check({key(rank)})) continue;
        const std::vector<uint8_t> value = store->get(key(rank));
        reports.steps[rank] = std::string(value.begin(), value.end());
      }
      if (std::chrono::steady_clock::now() >= until) break;
      std::this_thread::sleep_for(kInterval);
    }
    store->set(has_left(group.getRank()), std::vector<uint8_t>{1});
    if (group.getRank() != 0) return reports;
    std::vector<std::string> reading;
    for (const auto& [rank, step] : reports.steps) reading.push_back(has_left(rank));
    const auto farewell = std::chrono::steady_clock::now() + kFarewell;
    while (!store->check(reading) && std::chrono::steady_clock::now() < farewell) {
      std::this_thread::sleep_for(kInterval);
    }
  } catch (...) {
    reports.store_lost = true;
  }
  return reports;
}

std::string describe(const c10d::ProcessGroup& group, int64_t step) {
  if (!group.getStore() || group.getSize() == 1) return {};
  const std::string mine = std::to_string(step);
  const Reports reports = collect_reports(group, mine);
  std::vector<int> silent;
  std::string elsewhere;
  for (int rank = 0; rank < group.getSize(); ++rank) {
    const auto found = reports.steps.find(rank);
    if (found == reports.steps.end()) {
      silent.push_back(rank);
    } else if (found->second != mine) {
      elsewhere += "; rank " + std::to_string(rank) + " failed in backward number " + found->second +
                   ", this one in number " + mine;
    }
  }
  std::string text;
  if (!silent.empty()) {
    text = "; " + list_of(silent) + (silent.size() == 1 ? " has" : " have") +
           " not reported this failure " +
           (reports.store_lost ? "(the store, through which ranks report, ended with the rank that keeps "
                                 "it, as a rule rank 0)"
                               : "within 5 s: stopped, or never came to this backward");
  }
  return text + elsewhere;
}

}  // namespace

std::string describe_lost_ranks(const c10d::ProcessGroup& group, int64_t step) noexcept {
  try {
    return describe(group, step);
  } catch (...) {
    return {};
  }
}

}  // namespace apex::parallel
