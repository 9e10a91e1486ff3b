// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/recording.h"

#include <ATen/Functions.h>

namespace apex::parallel::detail {

at::Tensor encode(const Recording& recording) {
  const auto count = static_cast<int64_t>(recording.parameters.size());
  const at::Tensor table = at::empty({2 * count}, at::kInt);
  int32_t* const out = table.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    const RecordedParameter& parameter = recording.parameters[i];
    out[i] = parameter.sparse_dim;
    out[count + i] = parameter.fired;
  }
  return table;
}

at::Tensor encode_order(const Recording& recording) {
  std::vector<int64_t> order = recording.ready_order;
  order.resize(recording.parameters.size(), -1);
  return at::tensor(order, at::kLong);
}

Recording decode(const at::Tensor& maximum, const at::Tensor& order_of_rank_0,
                 const std::vector<uint8_t>& used_by_any) {
  const int64_t count = order_of_rank_0.numel();
  const int32_t* const in = maximum.const_data_ptr<int32_t>();
  Recording agreed;
  for (int64_t i = 0; i < count; ++i) agreed.parameters.push_back({in[i], in[count + i]});
  const int64_t* const order = order_of_rank_0.const_data_ptr<int64_t>();
  std::vector<bool> listed(count, false);
  for (int64_t i = 0; i < count && order[i] >= 0; ++i) {
    agreed.ready_order.push_back(order[i]);
    listed[order[i]] = true;
  }
  // Parameters that rank 0 does not use follow in the usual order of backward.
  for (int64_t i = count - 1; i >= 0; --i) {
    if (used_by_any[i] != 0 && !listed[i]) agreed.ready_order.push_back(i);
  }
  return agreed;
}

}  // namespace apex::parallel::detail
