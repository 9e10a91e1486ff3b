// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/detail/bucket_assignment.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <apex/error.h>

namespace apex::parallel {

namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
constexpr int64_t kMebi = int64_t{1} << 20;

// Default bucket sizes. Over a link of 1 Gbit/s between CPUs, a step takes 6 to 12 % longer with
// buckets of 25 or 40 MiB than with 0.5 to 4 MiB; sizes in this range do not differ. On one machine
// the number of collectives determines the cost.
constexpr int64_t kCpuBytes = 8 * kMebi;
constexpr int64_t kDeviceElements = 10'000'000;
constexpr int64_t kFirstBytes = kMebi;

/// The bucket that is currently filled for one (dtype, device).
struct OpenBucket {
  at::ScalarType dtype;
  at::Device device;
  int64_t cap;
  int64_t size = 0;
  std::vector<int64_t> members;
};

int64_t bytes_of(const ParameterInfo& parameter) {
  return parameter.numel * static_cast<int64_t>(c10::elementSize(parameter.dtype));
}

void check_indices(const std::vector<int64_t>& indices, size_t count, bool unique,
                   const char* what) {
  std::vector<bool> seen(count, false);
  for (const int64_t index : indices) {
    const bool is_valid = index >= 0 && static_cast<size_t>(index) < count;
    if (!is_valid || (unique && seen[index])) {
      throw InvalidArgument(std::string("assign_buckets: ") + what + " names parameter " +
                            std::to_string(index) + (is_valid ? " twice" : ", of ") +
                            (is_valid ? "" : std::to_string(count)));
    }
    seen[index] = true;
  }
}

}  // namespace

BucketLimits BucketLimits::in_mib(double mib) {
  if (!(mib > 0)) {
    throw InvalidArgument("bucket_cap_mb is " + std::to_string(mib) + "; it must be positive");
  }
  const double bytes = mib * static_cast<double>(kMebi);
  const int64_t cap = bytes < static_cast<double>(kUnlimited)
                          ? std::max<int64_t>(1, static_cast<int64_t>(bytes))
                          : kUnlimited;
  return {cap, std::min(cap, kMebi), Unit::kBytes};
}

BucketPlan assign_buckets(const std::vector<ParameterInfo>& parameters,
                          const std::vector<int64_t>& ready_order, const BucketLimits& limits,
                          const std::vector<int64_t>& closing) {
  if (limits.cap < 0 || limits.first_cap < 0 || (limits.cap == 0 && limits.first_cap > 0)) {
    throw InvalidArgument("assign_buckets: bucket sizes must be positive, or both 0, got " +
                          std::to_string(limits.cap) + " (first bucket " +
                          std::to_string(limits.first_cap) + ")");
  }
  check_indices(ready_order, parameters.size(), /*unique=*/true, "ready_order");
  check_indices(closing, parameters.size(), /*unique=*/false, "closing");

  const auto size_of = [&](const ParameterInfo& of) {
    const bool in_bytes = limits.cap == 0 || limits.unit == BucketLimits::Unit::kBytes;
    return in_bytes ? bytes_of(of) : of.numel;
  };
  const auto cap_of = [&](const ParameterInfo& of) {
    if (!closing.empty()) return kUnlimited;
    if (limits.cap > 0) return limits.cap;
    return of.device.is_cpu() ? kCpuBytes
                              : kDeviceElements * static_cast<int64_t>(c10::elementSize(of.dtype));
  };
  const auto first_cap_of = [&](const ParameterInfo& of) {
    const int64_t later = cap_of(of);
    if (!closing.empty()) return later;
    if (limits.cap > 0) return limits.first_cap > 0 ? limits.first_cap : later;
    int64_t together = 0;  // of gradients that share a bucket
    for (const int64_t index : ready_order) {
      const ParameterInfo& other = parameters[index];
      const bool same = other.dtype == of.dtype && other.device == of.device;
      if (same && bytes_of(other) < later) together += bytes_of(other);
    }
    return together > later ? kFirstBytes : later;
  };
  std::vector<bool> closes(parameters.size(), false);
  for (const int64_t index : closing) closes[index] = true;

  BucketPlan plan;
  std::vector<OpenBucket> open;
  auto close = [&plan](OpenBucket& bucket) {
    if (!bucket.members.empty()) plan.buckets.push_back(std::move(bucket.members));
    bucket.members.clear();
    bucket.size = 0;
  };

  for (const int64_t index : ready_order) {
    const ParameterInfo& parameter = parameters[index];
    const int64_t size = size_of(parameter);
    if (size >= cap_of(parameter)) {
      // Large enough for its own bucket. Small gradients before and after it stay together.
      plan.buckets.push_back({index});
    } else {
      auto bucket = std::find_if(open.begin(), open.end(), [&](const OpenBucket& candidate) {
        return candidate.dtype == parameter.dtype && candidate.device == parameter.device;
      });
      if (bucket == open.end()) {
        bucket = open.insert(open.end(),
                             {parameter.dtype, parameter.device, first_cap_of(parameter), 0, {}});
      }
      bucket->members.push_back(index);
      bucket->size += size;
      if (bucket->size >= bucket->cap) {
        close(*bucket);
        bucket->cap = cap_of(parameter);
      }
    }
    if (closes[index]) {
      for (OpenBucket& bucket : open) close(bucket);
    }
  }
  for (OpenBucket& bucket : open) close(bucket);

  // A bucket can be launched when its last member is ready, so buckets are ordered by that.
  std::vector<int64_t> position(parameters.size(), 0);
  for (size_t i = 0; i < ready_order.size(); ++i)
    position[ready_order[i]] = static_cast<int64_t>(i);
  std::sort(plan.buckets.begin(), plan.buckets.end(), [&](const auto& left, const auto& right) {
    return position[left.back()] < position[right.back()];
  });
  return plan;
}

}  // namespace apex::parallel
