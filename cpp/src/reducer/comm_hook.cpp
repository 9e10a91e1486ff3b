// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/comm_hook.h>

#include <typeinfo>

#include <c10/util/Type.h>

namespace apex::parallel {

CommHook::~CommHook() = default;

std::string CommHook::name() const { return c10::demangle(typeid(*this).name()); }

}  // namespace apex::parallel
