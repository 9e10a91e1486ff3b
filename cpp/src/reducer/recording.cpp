// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/recording.h"

#include <functional>

#include <ATen/Functions.h>

#include "reducer/step_facts.h"

namespace apex::parallel::detail {

at::Tensor encode(const Recording& recording) {
  const auto count = static_cast<int64_t>(recording.parameters.size());
  const at::Tensor table = at::zeros({5 * count + StepFacts::kCount + 2}, at::kInt);
  int32_t* const out = table.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    const RecordedParameter& parameter = recording.parameters[i];
    out[i] = parameter.used;
    out[count + i] = parameter.sparse_dim;
    out[2 * count + i] = parameter.fired;
    out[3 * count + i] = parameter.trainable;
    out[4 * count + i] = parameter.in_parts;
  }
  for (int i = 0; i < StepFacts::kCount; ++i) {
    out[5 * count + i] = static_cast<int32_t>((recording.facts >> i) & 1U);
  }
  // With both signs: the maxima cancel if it is the same on every rank.
  const auto settings =
      static_cast<int32_t>(std::hash<std::string>()(recording.settings) & 0x7fffffffU);
  out[5 * count + StepFacts::kCount] = settings;
  out[5 * count + StepFacts::kCount + 1] = -settings;
  return table;
}

at::Tensor encode_order(const Recording& recording) {
  std::vector<int64_t> order = recording.ready_order;
  order.resize(recording.parameters.size(), -1);
  return at::tensor(order, at::kLong);
}

AgreedRecording decode(const at::Tensor& maximum, const at::Tensor& order_of_rank_0) {
  const int64_t count = order_of_rank_0.numel();
  const int32_t* const in = maximum.const_data_ptr<int32_t>();
  AgreedRecording agreed;
  for (int64_t i = 0; i < count; ++i) {
    agreed.parameters.push_back({in[i] != 0, in[count + i], in[2 * count + i],
                                 in[3 * count + i] != 0, in[4 * count + i] != 0});
  }
  for (int i = 0; i < StepFacts::kCount; ++i) {
    agreed.facts |= in[5 * count + i] != 0 ? uint32_t{1} << i : 0;
  }
  agreed.same_settings =
      in[5 * count + StepFacts::kCount] == -in[5 * count + StepFacts::kCount + 1];
  const int64_t* const order = order_of_rank_0.const_data_ptr<int64_t>();
  std::vector<bool> listed(count, false);
  for (int64_t i = 0; i < count && order[i] >= 0; ++i) {
    agreed.ready_order.push_back(order[i]);
    listed[order[i]] = true;
  }
  // Used elsewhere but not on rank 0: in the order in which backward usually goes.
  for (int64_t i = count - 1; i >= 0; --i) {
    if (agreed.parameters[i].used && !listed[i]) agreed.ready_order.push_back(i);
  }
  return agreed;
}

}  // namespace apex::parallel::detail
