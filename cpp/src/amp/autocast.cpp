// SPDX-License-Identifier: BSD-3-Clause
#include <apex/amp.h>

#include <string>

#include <ATen/autocast_mode.h>

#include <apex/error.h>

namespace apex::amp {

namespace {

at::DeviceType checked(at::DeviceType device_type) {
  if (!at::autocast::is_autocast_available(device_type)) {
    throw InvalidArgument("AutocastGuard: autocast does not support devices of type " +
                          c10::DeviceTypeName(device_type, /*lower_case=*/true) +
                          "; do not construct the guard for them.");
  }
  return device_type;
}

}  // namespace

AutocastGuard::AutocastGuard(at::DeviceType device_type, std::optional<at::ScalarType> dtype,
                             bool enabled, bool cache_enabled)
    : device_type_(checked(device_type)),
      enabled_before_(at::autocast::is_autocast_enabled(device_type)),
      dtype_before_(at::autocast::get_autocast_dtype(device_type)),
      cache_enabled_before_(at::autocast::is_autocast_cache_enabled()),
      changes_dtype_(dtype && *dtype != dtype_before_) {
  if (dtype && *dtype != at::kHalf && *dtype != at::kBFloat16) {
    throw InvalidArgument(std::string("AutocastGuard: the dtype is ") + c10::toString(*dtype) +
                          "; it must be float16 or bfloat16 (enabled=false keeps float32).");
  }
  at::autocast::increment_nesting();
  at::autocast::set_autocast_enabled(device_type, enabled);
  at::autocast::set_autocast_cache_enabled(cache_enabled);
  if (changes_dtype_) {
    // The cache's keys are parameters, without the dtype that they were cast to.
    at::autocast::clear_cache();
    at::autocast::set_autocast_dtype(device_type, *dtype);
  }
}

AutocastGuard::~AutocastGuard() {
  const bool outermost = at::autocast::decrement_nesting() == 0;
  if (outermost || changes_dtype_) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, enabled_before_);
  at::autocast::set_autocast_dtype(device_type_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_enabled_before_);
}

}  // namespace apex::amp
