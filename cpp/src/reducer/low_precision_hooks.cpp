// SPDX-License-Identifier: BSD-3-Clause
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <apex/error.h>
#include <apex/parallel/comm_hook.h>

#include "comm/collectives.h"

namespace apex::parallel {

namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

void check_arguments(const GroupPtr& group, at::ScalarType dtype) {
  if (!group) throw InvalidArgument("a communication hook needs a process group");
  if (dtype == at::kHalf || dtype == at::kBFloat16) return;
  std::ostringstream out;
  out << "a low-precision communication hook sends float16 or bfloat16, got " << dtype;
  throw InvalidArgument(out.str());
}

class CompressHook final : public CommHook {
 public:
  CompressHook(GroupPtr group, at::ScalarType dtype) : group_(std::move(group)), dtype_(dtype) {}

  std::string name() const override {
    return std::string("all-reduce in ") + c10::toString(dtype_);
  }

  bool may_chain() const override { return false; }

  FuturePtr run(GradientBucket& bucket) override {
    const bool narrows =
        static_cast<size_t>(bucket.buffer.element_size()) > c10::elementSize(dtype_);
    at::Tensor message = narrows ? bucket.buffer.to(dtype_) : bucket.buffer;
    message.div_(group_->getSize());
    // By the group's own function: works of this library's channels have no future.
    std::vector<at::Tensor> messages{message};
    return call_collective("compressed all-reduce", *group_,
                           [&] { return group_->allreduce(messages); })
        ->getFuture();
  }

 private:
  const GroupPtr group_;
  const at::ScalarType dtype_;
};

}  // namespace

std::shared_ptr<CommHook> make_compress_hook(GroupPtr group, at::ScalarType dtype) {
  check_arguments(group, dtype);
  return std::make_shared<CompressHook>(std::move(group), dtype);
}

}  // namespace apex::parallel
