// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/reduction.h"

namespace apex::parallel::detail {

namespace {

class LocalReduction final : public Reduction {
 public:
  ReductionTraits traits() const override {
    ReductionTraits traits;
    traits.has_peers = false;
    return traits;
  }
  std::string describe() const override { return "reduction of bucket "; }
  void start(const BucketMessage&, const at::Tensor&, const std::string&) override { done_ = true; }
  void wait(const std::string&, const std::function<void()>&) override { done_ = false; }
  bool done() const override { return done_; }
  void drop() noexcept override { done_ = false; }

 private:
  bool done_ = false;
};

}  // namespace

std::unique_ptr<Reduction> make_local_reduction() { return std::make_unique<LocalReduction>(); }

std::unique_ptr<Reduction> choose_reduction(const ReductionSite& site) {
  if (site.hook) return make_hook_reduction(site);
  return site.alone ? make_local_reduction() : make_all_reduce(site);
}

}  // namespace apex::parallel::detail
