// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

#include "comm/membership.h"

namespace apex::parallel::detail {

/// Averages gradients that somebody else computes, and says so one by one. See
/// apex_reducer_create().
class APEX_API NotifiedReducer {
 public:
  NotifiedReducer(c10::intrusive_ptr<c10d::ProcessGroup> group,
                  const std::vector<at::Tensor>& parameters, std::vector<at::Tensor> gradients,
                  int64_t bucket_bytes);
  ~NotifiedReducer();
  NotifiedReducer(const NotifiedReducer&) = delete;
  NotifiedReducer& operator=(const NotifiedReducer&) = delete;

  void gradient_ready(size_t index);
  void synchronize();

 private:
  struct Bucket {
    std::vector<size_t> members;
    at::Tensor buffer;  ///< [elements]: the gradients, one after another
    size_t missing = 0;
    c10::intrusive_ptr<c10d::Work> work;
    std::string what;  ///< for errors
  };
  struct Place {
    size_t bucket = 0;
    at::Tensor view;  ///< of the bucket's buffer, shaped as the gradient
    bool ready = false;
  };

  void launch_complete(bool all);
  void begin_step();

  Membership members_;
  const std::vector<at::Tensor> gradients_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;
  size_t launched_ = 0;  ///< buckets of this step, in their order, which is that of every rank
};

}  // namespace apex::parallel::detail
