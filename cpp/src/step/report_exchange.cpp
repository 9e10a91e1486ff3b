// SPDX-License-Identifier: BSD-3-Clause
#include "step/report_exchange.h"

#include <algorithm>

#include <ATen/Functions.h>

namespace apex::parallel::detail {

void ReportExchange::send(const std::string& what, const StepReport& report,
                          const std::vector<uint8_t>& used, const std::vector<bool>& trainable) {
  order();
  drop();
  const at::Tensor row =
      at::empty({static_cast<int64_t>(StepTable::row_size(parameters_))}, at::kLong);
  int64_t* const words = row.mutable_data_ptr<int64_t>();
  StepTable::encode(report, used, trainable, words);
  const at::Device device = members_.alone() ? at::Device(at::kCPU) : members_.control_device();
  if (device.is_cpu()) {
    message_ = members_.all_gather(what, row);
    return;
  }
  if (!on_device_.defined() || on_device_.device() != device) {
    on_device_ = at::empty_like(row, row.options().device(device));
    gathered_ = at::empty({members_.size * row.numel()}, on_device_.options());
    row_ = at::Tensor();
  }
  const bool same =
      row_.defined() && std::equal(words, words + row.numel(), row_.const_data_ptr<int64_t>());
  if (!same) on_device_.copy_(row_ = row, /*non_blocking=*/true);
  message_ = members_.all_gather(what, on_device_, gathered_);
}

const StepTable* ReportExchange::peek() {
  if (!table_ && message_.arrived()) receive({});
  return table_ ? &*table_ : nullptr;
}

const StepTable& ReportExchange::receive(const std::function<void()>& meanwhile) {
  if (!table_) {
    const at::Tensor rows = message_.wait(meanwhile);
    const int64_t* const words = rows.const_data_ptr<int64_t>();
    table_ = StepTable(std::vector<int64_t>(words, words + rows.numel()),
                       static_cast<size_t>(members_.size), parameters_);
    message_ = {};
  }
  return *table_;
}

void ReportExchange::drop() {
  message_ = {};
  table_.reset();
}

}  // namespace apex::parallel::detail
