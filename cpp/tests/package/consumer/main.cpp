// SPDX-License-Identifier: BSD-3-Clause
// A consumer program: calls the library, catches its errors, and prints what the test looks
// for. Few headers, so that it builds in a second or two.

#include <cstdio>
#include <string>

#include <apex/error.h>
#include <apex/parallel/detail/bucket_assignment.h>
#include <apex/version.h>

#ifdef CONSUMER_OPERATORS
#include <ATen/core/dispatch/Dispatcher.h>
#endif

int main() {
  using namespace apex::parallel;
  const std::vector<ParameterInfo> parameters(5, ParameterInfo{40});
  BucketLimits limits;
  limits.cap = 80;
  std::printf("apex %s, C++ %ld, ", APEX_VERSION, __cplusplus / 100L);
  std::printf("%zu buckets", assign_buckets(parameters, {4, 3, 2, 1, 0}, limits).buckets.size());
  try {
    assign_buckets(parameters, {9}, limits);
  } catch (const apex::InvalidArgument&) {
    std::printf(", refused");
  }
#ifdef CONSUMER_OPERATORS
  const auto op = c10::Dispatcher::singleton().findSchema({"apex::sync_batch_norm", ""});
  std::printf(", operators %s", op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
                                        op->hasKernelForDispatchKey(c10::DispatchKey::Autograd)
                                    ? "registered"
                                    : "MISSING");
#endif
  std::printf("\n");
}
