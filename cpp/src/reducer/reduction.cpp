// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/reduction.h"

#include <memory>
#include <typeinfo>

#include <c10/util/Type.h>

namespace apex::parallel {

CommHook::~CommHook() = default;

std::string CommHook::name() const { return c10::demangle(typeid(*this).name()); }

namespace detail {

namespace {

/// For one rank, where the tensor already is the sum. A call to a backend would cost more than the
/// rest of a step.
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

std::unique_ptr<Reduction> choose_reduction(const ReductionSite& site) {
  if (site.hook) return make_hook_reduction(site);
  if (site.alone) return std::make_unique<LocalReduction>();
  return make_all_reduce(site);
}

}  // namespace detail

}  // namespace apex::parallel
