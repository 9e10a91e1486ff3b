// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A few elements of a few parameters, by which a write is noticed that moves no version counter.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel {

// Note [Writes that move no version]
//
// libtorch's SGD writes parameters through .data(), whose version counter is another one, and there
// is no hook on the steps of libtorch's optimizers. So a program that only calls sgd.step() would
// look as if it never updated a parameter, and one that calls it twice as if it had done so once.
// The values tell: 32 elements, spread over 8 parameters of the bucket plan, are compared with what
// they were in the last synchronized backward. All ranks take the same elements, since they have
// the same plan, so how far these have moved is the same on all of them, too, where all have made
// the same steps.

/// Parameters on the CPU, strided, dense, of a floating or complex dtype; others are passed over.
/// Not thread safe.
class ParameterSample {
 public:
  /// What has happened to the elements.
  struct Change {
    bool any = false;     ///< one has another value
    double distance = 0;  ///< sum of the absolute differences
  };

  static constexpr size_t kParameters = 8;
  static constexpr size_t kElements = 4;

  /// Takes elements of these parameters, evenly spaced, with the values that they have now.
  void watch(const std::vector<at::Tensor>& parameters);
  bool empty() const { return sites_.empty(); }

  /// The change since watch() or the last take(). A parameter that has become another in dtype,
  /// device or size since does not count.
  Change take();

  /// Of the values that the elements had then; 0 where there are none. The same on ranks with the
  /// same parameters.
  int64_t fingerprint() const;

 private:
  struct Site {
    at::Tensor parameter;
    at::ScalarType dtype = at::kFloat;
    int64_t numel = 0;
    size_t count = 0;
    std::array<int64_t, kElements> offsets{};
    std::array<double, kElements> values{};
  };

  static const void* memory_of(const at::Tensor& parameter);
  static bool read(const Site& site, std::array<double, kElements>& values);

  std::vector<Site> sites_;
};

}  // namespace apex::parallel
