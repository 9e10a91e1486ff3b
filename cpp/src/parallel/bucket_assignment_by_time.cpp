#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include <apex/error.h>
#include <apex/parallel/bucket_assignment.h>

namespace apex::parallel {

namespace {

using Type = std::pair<at::ScalarType, at::Device>;

double bytes_of(const ParameterInfo& parameter) {
  return static_cast<double>(parameter.numel) *
         static_cast<double>(c10::elementSize(parameter.dtype));
}

void check(const std::vector<ParameterInfo>& parameters, const std::vector<int64_t>& ready_order,
           const std::vector<double>& ready_s, const ReduceCost& cost) {
  if (ready_order.size() != ready_s.size()) {
    throw InvalidArgument("assign_buckets_by_time: " + std::to_string(ready_order.size()) +
                          " parameters, but " + std::to_string(ready_s.size()) + " ready times");
  }
  for (const double value : {cost.latency_s, cost.seconds_per_byte, cost.copy_seconds_per_byte}) {
    if (!(value >= 0) || !std::isfinite(value)) {
      throw InvalidArgument("assign_buckets_by_time: costs must be finite and not negative, got " +
                            std::to_string(value));
    }
  }
  // Indices are checked by assign_buckets().
  BucketLimits limits;
  assign_buckets(parameters, ready_order, limits);
}

}  // namespace

TimedPlan assign_buckets_by_time(const std::vector<ParameterInfo>& parameters,
                                 const std::vector<int64_t>& ready_order,
                                 const std::vector<double>& ready_s, const ReduceCost& cost) {
  check(parameters, ready_order, ready_s, cost);
  // Sparse gradients travel apart, whatever the plan.
  std::vector<int64_t> order;
  std::vector<double> ready;
  double clock = 0;
  for (size_t i = 0; i < ready_order.size(); ++i) {
    clock = std::max(clock, ready_s[i]);
    if (parameters[ready_order[i]].sparse) continue;
    order.push_back(ready_order[i]);
    ready.push_back(clock);
  }

  const size_t count = order.size();
  std::vector<double> end(count + 1, 0);
  std::vector<size_t> start(count + 1, 0);
  std::vector<Type> types;
  for (size_t j = 1; j <= count; ++j) {
    end[j] = std::numeric_limits<double>::infinity();
    types.clear();
    double bytes = 0;
    for (size_t i = j; i-- > 0;) {
      const ParameterInfo& parameter = parameters[order[i]];
      bytes += bytes_of(parameter);
      const Type type{parameter.dtype, parameter.device};
      if (std::find(types.begin(), types.end(), type) == types.end()) types.push_back(type);
      const double copy = i + 1 == j ? 0 : bytes * cost.copy_seconds_per_byte;
      const double done = std::max(end[i], ready[j - 1] + copy) +
                          static_cast<double>(types.size()) * cost.latency_s +
                          bytes * cost.seconds_per_byte;
      // Of equal ends, the longer run: fewer messages.
      if (done <= end[j]) {
        end[j] = done;
        start[j] = i;
      }
    }
  }

  std::vector<int64_t> closing;
  for (size_t j = count; j > 0; j = start[j]) closing.push_back(order[j - 1]);
  TimedPlan result;
  result.end_s = end[count];
  result.plan = assign_buckets(parameters, ready_order, BucketLimits{}, closing);
  return result;
}

}  // namespace apex::parallel
