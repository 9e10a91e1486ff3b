// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace apex::parallel::detail {

class ReducerCore;

/// A reducer for gradients that the caller computes and announces one by one. See
/// apex_reducer_create().
class APEX_API NotifiedReducer {
 public:
  NotifiedReducer(c10::intrusive_ptr<c10d::ProcessGroup> group,
                  const std::vector<at::Tensor>& parameters, std::vector<at::Tensor> gradients,
                  int64_t bucket_bytes, bool weighted = false);
  ~NotifiedReducer();
  NotifiedReducer(const NotifiedReducer&) = delete;
  NotifiedReducer& operator=(const NotifiedReducer&) = delete;

  /// Sets the weight of the next step, which must not have begun.
  void set_weight(double weight);
  void gradient_ready(size_t index);
  void synchronize();

 private:
  void begin_step();

  const std::vector<at::Tensor> gradients_;  ///< the caller's memory
  std::vector<at::Tensor> variables_;        ///< the engine's parameters
  std::vector<bool> ready_;                  ///< announced in this step; empty before a step
  std::shared_ptr<ReducerCore> core_;
};

}  // namespace apex::parallel::detail
