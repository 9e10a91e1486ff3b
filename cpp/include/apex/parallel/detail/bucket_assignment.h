// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <apex/export.h>

/// Assigns parameters to gradient buckets. Pure functions: no tensors, no communication, no state.

namespace apex::parallel {

/// Properties of a parameter that decide its bucket.
struct ParameterInfo {
  int64_t numel = 0;                             ///< elements; 0 is allowed
  at::ScalarType dtype = at::ScalarType::Float;  ///< dtype of the gradient
  at::Device device = at::Device(at::DeviceType::CPU);
};

/// Size limits of a bucket. They apply per (dtype, device), since a bucket holds one dtype on one
/// device.
struct BucketLimits {
  enum class Unit { kElements, kBytes };

  /// A bucket is closed as soon as it holds at least this much. A single parameter of this size is
  /// a bucket of its own. 0 chooses by device: 8 MiB on the CPU; elsewhere NVIDIA Apex's 10,000,000
  /// elements, with a first bucket of 1 MiB if there is more than one bucket.
  int64_t cap = 0;

  /// The limit for the first bucket of each (dtype, device); 0 means `cap`. A small first bucket
  /// starts communication early. Must be 0 if `cap` is 0.
  int64_t first_cap = 0;

  Unit unit = Unit::kElements;

  /// The limits of `bucket_cap_mb`: the first bucket of each (dtype, device) has at most 1 MiB, as
  /// in torch. Infinity: a single bucket after the first.
  /// @throws InvalidArgument if it is not positive.
  APEX_API static BucketLimits in_mib(double mib);
};

/// A partition of parameters into buckets.
struct BucketPlan {
  /// Parameter indices of each bucket. Buckets are in launch order, which is the same on every
  /// rank: sorted by the time at which the last gradient of a bucket becomes ready.
  std::vector<std::vector<int64_t>> buckets;

  bool operator==(const BucketPlan& other) const { return buckets == other.buckets; }
};

/// Assigns parameters to buckets in the order in which their gradients become ready.
///
/// @param parameters   all parameters, by index.
/// @param ready_order  indices into `parameters`, each at most once, first ready first; parameters
///                     that are not listed are in no bucket.
/// @param limits       the size at which a bucket is closed.
/// @param closing      indices of parameters that close every open bucket, after being added to it.
///                     If not empty, `limits` is ignored, and the parameters after the last of
///                     them form the last buckets.
/// @throws InvalidArgument for a negative limit, limits that contradict each other, or an index
///         that is out of range or repeated. Thread safe. The same input gives the same plan on
///         every rank and platform.
APEX_API BucketPlan assign_buckets(const std::vector<ParameterInfo>& parameters,
                                   const std::vector<int64_t>& ready_order,
                                   const BucketLimits& limits,
                                   const std::vector<int64_t>& closing = {});

}  // namespace apex::parallel
