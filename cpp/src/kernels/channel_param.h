// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "host_device.h"

/// A per-channel array of any floating type and stride: weight, bias, running statistics and
/// gradients. The type is a run-time value, not a template argument, because elements are read and
/// written only once per channel.

namespace apex::kernels {

enum class ParamType : int { kNone, kFloat32, kFloat64, kFloat16, kBFloat16 };

struct ChannelParam {
  void* data = nullptr;
  ParamType type = ParamType::kNone;
  int64_t stride = 1;  // in elements

  APEX_HOST_DEVICE bool present() const { return type != ParamType::kNone; }

  APEX_HOST_DEVICE double load(int64_t channel, double absent) const {
    const int64_t at = channel * stride;
    switch (type) {
      case ParamType::kFloat32:
        return static_cast<const float*>(data)[at];
      case ParamType::kFloat64:
        return static_cast<const double*>(data)[at];
      case ParamType::kFloat16:
        return static_cast<double>(static_cast<float>(static_cast<const c10::Half*>(data)[at]));
      case ParamType::kBFloat16:
        return static_cast<double>(static_cast<float>(static_cast<const c10::BFloat16*>(data)[at]));
      default:
        return absent;
    }
  }

  APEX_HOST_DEVICE void store(int64_t channel, double value) const {
    const int64_t at = channel * stride;
    switch (type) {
      case ParamType::kFloat32:
        static_cast<float*>(data)[at] = static_cast<float>(value);
        break;
      case ParamType::kFloat64:
        static_cast<double*>(data)[at] = value;
        break;
      case ParamType::kFloat16:
        static_cast<c10::Half*>(data)[at] = c10::Half(static_cast<float>(value));
        break;
      case ParamType::kBFloat16:
        static_cast<c10::BFloat16*>(data)[at] = c10::BFloat16(static_cast<float>(value));
        break;
      default:
        break;
    }
  }
};

}  // namespace apex::kernels
