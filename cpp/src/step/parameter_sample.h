// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What has happened on this rank since its last synchronized backward, and a sample of parameter
/// elements, which detects writes that do not change a version counter.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "step/step_report.h"

namespace apex::parallel {

/// Samples elements of strided parameters of a floating or complex dtype: 32 elements, spread over
/// 8 parameters. They show every kind of write, also one that bumps no version counter, such as
/// those of libtorch's SGD and of fused kernels. Reads of parameters on devices wait for the
/// device. Not thread safe.
class ParameterSample {
 public:
  static constexpr size_t kParameters = 8;
  static constexpr size_t kElements = 4;

  /// Samples evenly spaced elements of these parameters, with their current values.
  void watch(const std::vector<at::Tensor>& parameters);

  /// The distance that the elements have moved since watch() or the last take(): the sum of the
  /// absolute differences, 0 if no value has changed. A parameter whose dtype, device or size has
  /// changed since is ignored.
  double take();

  /// A fingerprint of the values at the last watch() or take(); 0 if there are none. It is the same
  /// on ranks with the same parameters.
  int64_t fingerprint() const;

 private:
  using Values = std::array<double, kElements>;
  struct Site {
    at::Tensor parameter;
    at::ScalarType dtype = at::kFloat;
    int64_t numel = 0;
    size_t count = 0;
    std::array<int64_t, kElements> offsets{};
    at::Tensor on_device;  ///< `offsets` on the parameter's device, if that is not the CPU
    Values values{};
  };

  static const void* memory_of(const at::Tensor& parameter);
  static bool read(const Site& site, Values& values);
  std::vector<std::optional<Values>> read_all() const;

  std::vector<Site> sites_;
};

/// Tracks the events on this rank since its last synchronized backward: see Note [Ranks that are
/// out of step]. Does not communicate. Only optimizer_stepped() is thread safe.
class StepTracker {
 public:
  /// Compares these parameters from now on.
  void sample(const std::vector<at::Tensor>& parameters) { sample_.watch(parameters); }
  /// A gradient has arrived in a backward that is not synchronized.
  void gradient_arrived_locally() {
    if (!local_.exchange(true)) before_local_ = sample_.take();
  }
  /// An optimizer that holds parameters of this reducer has stepped.
  void optimizer_stepped() {
    ++steps_;
    if (local_) stepped_locally_ = true;
  }

  /// A synchronized backward begins. By their versions, parameters were `written` since the last
  /// one began, or `written_locally`, after a gradient that was not synchronized.
  void backward_began(bool written, bool written_locally) {
    const double last = sample_.take();
    facts_.local = (local_.exchange(false) && last != 0) || written_locally;
    facts_.moved = std::exchange(before_local_, 0) + last;
    facts_.written = written;
    facts_.steps = steps_.exchange(0);
    facts_.stepped_locally = stepped_locally_.exchange(false);
    facts_.sample = sample_.fingerprint();
  }
  /// The facts of the backward that has begun.
  const StepFacts& facts() const { return facts_; }
  /// Parameters were made equal on all ranks: ignores what has happened before.
  void forget() { backward_began(false, false); }

 private:
  std::atomic<int64_t> steps_{0};             ///< since the last synchronized backward began
  std::atomic<bool> local_{false};            ///< a gradient arrived without synchronization since
  std::atomic<bool> stepped_locally_{false};  ///< an optimizer has stepped after that
  ParameterSample sample_;
  double before_local_ = 0;  ///< how far sample_ had moved before the first local gradient
  StepFacts facts_;
};

}  // namespace apex::parallel
