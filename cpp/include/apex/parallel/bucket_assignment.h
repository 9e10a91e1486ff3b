// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <apex/export.h>

/// Which gradients travel together. Pure functions: no tensors, no communication, no state.

namespace apex::parallel {

/// What the assignment needs to know of one parameter.
struct ParameterInfo {
  int64_t numel = 0;                             ///< elements; 0 is allowed
  at::ScalarType dtype = at::ScalarType::Float;  ///< dtype of the gradient
  at::Device device = at::Device(at::DeviceType::CPU);
  bool sparse = false;  ///< its gradient has sparse layout: a bucket of its own
};

/// How large a bucket may grow. Sizes are counted per (dtype, device), since a bucket holds one
/// dtype on one device.
struct BucketLimits {
  enum class Unit { kElements, kBytes };

  /// A bucket is closed as soon as it holds at least this much; a parameter that reaches it alone
  /// is a bucket of its own (and can be reduced where it is, without a copy). 0 means by device: on
  /// the CPU 8 MiB, elsewhere the 10,000,000 elements of NVIDIA Apex, the first bucket 1 MiB where
  /// there has to be more than one.
  int64_t cap = 0;

  /// The same for the first bucket of each (dtype, device); 0 means `cap`. A small first bucket
  /// starts the communication early. Excludes a `cap` of 0.
  int64_t first_cap = 0;

  Unit unit = Unit::kElements;

  /// Buckets of `bytes`, the first of each (dtype, device) of at most 1 MiB, as torch's: what
  /// `bucket_cap_mb` means in every language, so that the ranks of a job agree.
  static BucketLimits in_bytes(int64_t bytes) {
    constexpr int64_t kMostOfFirst = int64_t{1} << 20;
    return {bytes, bytes < kMostOfFirst ? bytes : kMostOfFirst, Unit::kBytes};
  }
};

/// A partition of parameters into buckets.
struct BucketPlan {
  /// Parameter indices by bucket, buckets in the order in which every rank launches them: by the
  /// time at which the last member of each becomes ready.
  std::vector<std::vector<int64_t>> buckets;

  bool operator==(const BucketPlan& other) const { return buckets == other.buckets; }
};

/// Assigns parameters to buckets in the order in which their gradients become ready.
///
/// @param parameters   all parameters, by index.
/// @param ready_order  indices into `parameters`, each at most once, first ready first; parameters
///                     that are not listed are in no bucket.
/// @param limits       the size at which a bucket is closed.
/// @param closing      indices at which every open bucket is closed (with the parameter inside),
///                     whatever its size; when not empty, `limits` is ignored and what follows the
///                     last of them forms the last buckets.
/// @throws InvalidArgument when a limit is negative or excludes another, or an index is out of
/// range or repeated. Thread safe; the same input gives the same plan on every rank and platform.
APEX_API BucketPlan assign_buckets(const std::vector<ParameterInfo>& parameters,
                                   const std::vector<int64_t>& ready_order,
                                   const BucketLimits& limits,
                                   const std::vector<int64_t>& closing = {});

}  // namespace apex::parallel
