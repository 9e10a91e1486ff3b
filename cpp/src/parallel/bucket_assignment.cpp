#include <apex/parallel/bucket_assignment.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <apex/error.h>

namespace apex::parallel {

namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

/// The bucket that is being filled for one (dtype, device).
struct OpenBucket {
  at::ScalarType dtype;
  at::Device device;
  int64_t cap;
  int64_t size = 0;
  std::vector<int64_t> members;
};

void check_indices(const std::vector<int64_t>& indices, size_t count, bool unique,
                   const char* what) {
  std::vector<bool> seen(count, false);
  for (const int64_t index : indices) {
    if (index < 0 || static_cast<size_t>(index) >= count) {
      throw InvalidArgument(std::string("assign_buckets: ") + what + " names parameter " +
                            std::to_string(index) + ", but there are " + std::to_string(count) +
                            " parameters");
    }
    if (unique && seen[index]) {
      throw InvalidArgument(std::string("assign_buckets: ") + what + " names parameter " +
                            std::to_string(index) + " twice");
    }
    seen[index] = true;
  }
}

}  // namespace

BucketPlan assign_buckets(const std::vector<ParameterInfo>& parameters,
                          const std::vector<int64_t>& ready_order, const BucketLimits& limits,
                          const std::vector<int64_t>& closing) {
  if (limits.cap <= 0 || limits.first_cap < 0) {
    throw InvalidArgument("assign_buckets: bucket sizes must be positive, got " +
                          std::to_string(limits.cap) + " (first bucket " +
                          std::to_string(limits.first_cap) + ")");
  }
  check_indices(ready_order, parameters.size(), /*unique=*/true, "ready_order");
  check_indices(closing, parameters.size(), /*unique=*/false, "closing");

  const bool by_trigger = !closing.empty();
  const int64_t cap = by_trigger ? kUnlimited : limits.cap;
  const int64_t first_cap =
      by_trigger ? kUnlimited : (limits.first_cap > 0 ? limits.first_cap : limits.cap);
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
    const int64_t size =
        limits.unit == BucketLimits::Unit::kBytes
            ? parameter.numel * static_cast<int64_t>(c10::elementSize(parameter.dtype))
            : parameter.numel;
    if (parameter.sparse || size >= cap) {
      // Large enough to travel alone: the small ones around it stay together.
      plan.buckets.push_back({index});
    } else {
      auto bucket = std::find_if(open.begin(), open.end(), [&](const OpenBucket& candidate) {
        return candidate.dtype == parameter.dtype && candidate.device == parameter.device;
      });
      if (bucket == open.end()) {
        bucket = open.insert(open.end(), {parameter.dtype, parameter.device, first_cap, 0, {}});
      }
      bucket->members.push_back(index);
      bucket->size += size;
      if (bucket->size >= bucket->cap) {
        close(*bucket);
        bucket->cap = cap;
      }
    }
    if (closes[index]) {
      for (OpenBucket& bucket : open) close(bucket);
    }
  }
  for (OpenBucket& bucket : open) close(bucket);

  // A bucket can be launched when its last member is ready; that decides the order.
  std::vector<int64_t> position(parameters.size(), 0);
  for (size_t i = 0; i < ready_order.size(); ++i) position[ready_order[i]] = static_cast<int64_t>(i);
  std::sort(plan.buckets.begin(), plan.buckets.end(), [&](const auto& left, const auto& right) {
    return position[left.back()] < position[right.back()];
  });
  return plan;
}

}  // namespace apex::parallel
