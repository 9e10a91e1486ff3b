// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "reducer/observer.h"

// An observer of a reducer receives events from when it is added until it is removed.

namespace apex::parallel::detail {
namespace {

/// Counts gradients computed while no bucket was in flight, so that no communication was hidden.
class LonelyGradients final : public BackwardObserver {
 public:
  void began(std::optional<c10::Device>, size_t) override {
    count_ = 0;
    in_flight_.clear();
  }
  void gradient_ready(size_t) override { count_ += in_flight_.empty() ? 1 : 0; }
  void in_flight(size_t bucket, const Reduction&) override { in_flight_.insert(bucket); }
  void arrived(size_t bucket) override { in_flight_.erase(bucket); }

  int count() const { return count_; }

 private:
  int count_ = 0;
  std::set<size_t> in_flight_;
};

class NoReduction final : public Reduction {
 public:
  ReductionTraits traits() const override { return {}; }
  std::string describe() const override { return "nothing of bucket "; }
  void start(const BucketMessage&, const at::Tensor&, const std::string&) override {}
  void wait(const std::string&, const std::function<void()>&) override {}
  bool done() const override { return true; }
  void drop() noexcept override {}
};

TEST(Observers, TellsThoseThatWereAdded_UntilTheyAreRemoved) {
  const NoReduction reduction;
  Observers observers;
  LonelyGradients first, second;
  const auto backward = [&] {
    observers.tell(&BackwardObserver::began, std::optional<c10::Device>(at::kCPU), size_t{3});
    observers.tell(&BackwardObserver::gradient_ready, size_t{2});
    observers.tell(&BackwardObserver::in_flight, size_t{0}, reduction);
    observers.tell(&BackwardObserver::gradient_ready, size_t{1});
    observers.tell(&BackwardObserver::arrived, size_t{0});
    observers.tell(&BackwardObserver::gradient_ready, size_t{0});
  };
  backward();  // without an observer
  observers.add(&first);
  observers.add(&second);
  backward();
  EXPECT_EQ(first.count(), 2);
  EXPECT_EQ(second.count(), 2);
  observers.remove(&first);
  observers.tell(&BackwardObserver::gradient_ready, size_t{0});
  EXPECT_EQ(first.count(), 2);
  EXPECT_EQ(second.count(), 3);
}

}  // namespace
}  // namespace apex::parallel::detail
