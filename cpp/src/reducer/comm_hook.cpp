// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/comm_hook.h>

#include <typeinfo>

#include <c10/util/Type.h>

#include <apex/error.h>

namespace apex::parallel {

CommHook::~CommHook() = default;

std::string CommHook::name() const { return c10::demangle(typeid(*this).name()); }

c10::intrusive_ptr<c10::ivalue::Future> CommHook::finish(GradientBucket&, const at::Tensor&) {
  throw Error("a communication hook whose has_finish() is true must define finish()");
}

}  // namespace apex::parallel
