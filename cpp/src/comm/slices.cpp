// SPDX-License-Identifier: BSD-3-Clause
#include "comm/slices.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>

namespace apex::parallel {

namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Completes when its slices have, whose results are copied then, on a thread of Gloo.
class Slices final : public c10d::Work {
 public:
  Slices(c10d::OpType type, const char* title) : Work(-1, type, title) {}

  /// `source` is copied to `target` at the end.
  void copy_later(at::Tensor target, at::Tensor source) {
    copies_.emplace_back(std::move(target), std::move(source));
  }
  void add(const WorkPtr& slice) { futures_.push_back(slice->getFuture()); }

  void all_issued() {
    future_ = c10::collectAll(futures_)->then(
        [copies = std::move(copies_)](c10::ivalue::Future& done) {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          const at::NoGradGuard no_grad;
          std::vector<at::Tensor> results;
          for (const auto& [target, source] : copies) {
            target.copy_(source);
            results.push_back(target);
          }
          return c10::IValue(std::move(results));
        },
        c10::ListType::create(c10::TensorType::get()));
    const auto self = c10::intrusive_ptr<Slices>::reclaim_copy(this);
    future_->addCallback([self](c10::ivalue::Future& done) {
      self->finish(done.hasError() ? done.exception_ptr() : nullptr);
    });
  }

  FuturePtr getFuture() override { return future_; }

 private:
  c10::List<FuturePtr> futures_{c10::FutureType::create(c10::ListType::ofTensors())};
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  FuturePtr future_;
};

}  // namespace

WorkPtr all_gather_in_slices(const at::Tensor& gathered, const at::Tensor& share,
                             const std::function<WorkPtr(at::Tensor&, at::Tensor&)>& issue) {
  const at::NoGradGuard no_grad;
  const auto work = c10::make_intrusive<Slices>(c10d::OpType::_ALLGATHER_BASE, "apex:all_gather");
  const int64_t numel = share.numel();
  const at::Tensor flat = share.view({-1});
  const at::Tensor rows = gathered.view({-1, numel});
  // In one allocation, since many small ones would stay in the heap.
  const at::Tensor by_slice = at::empty({rows.size(0) * numel}, share.options());
  const int64_t step = kSliceBytes / static_cast<int64_t>(share.element_size());
  for (int64_t begin = 0; begin < numel; begin += step) {
    const int64_t length = std::min(step, numel - begin);
    at::Tensor mine = flat.narrow(0, begin, length);
    at::Tensor all = by_slice.narrow(0, rows.size(0) * begin, rows.size(0) * length);
    work->copy_later(rows.narrow(1, begin, length), all.view({-1, length}));
    work->add(issue(all, mine));
  }
  work->all_issued();
  return work;
}

}  // namespace apex::parallel
