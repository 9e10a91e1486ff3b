#include <apex/parallel/comm_hook.h>

#include <apex/error.h>

namespace apex::parallel {

CommHook::~CommHook() = default;

c10::intrusive_ptr<c10::ivalue::Future> CommHook::finish(GradientBucket&, const at::Tensor&) {
  throw Error("a communication hook that has_finish() has to define finish()");
}

}  // namespace apex::parallel
