// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/bucket_trailer.h"

#include <ATen/Dispatch.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace apex::parallel::detail {

namespace {

using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

/// Which of the numbers are above zero.
std::vector<uint8_t> above_zero(const at::Tensor& trailer) {
  std::vector<uint8_t> result(static_cast<size_t>(trailer.numel()), 0);
  if (result.empty()) return result;
  const BelowAutograd guard;
  const at::Tensor numbers = trailer.cpu();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, numbers.scalar_type(), "trailer", [&] {
    const scalar_t* values = numbers.const_data_ptr<scalar_t>();
    for (size_t i = 0; i < result.size(); ++i) result[i] = values[i] > scalar_t(0.0F);
  });
  return result;
}

}  // namespace

void BucketTrailer::write(const at::Tensor& trailer, const std::vector<uint8_t>& used,
                          uint32_t facts) const {
  if (numel() == 0) return;
  const auto is_used = [&](int64_t parameter) { return !used.empty() && used[parameter] != 0; };
  if (trailer.is_cpu()) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, trailer.scalar_type(), "trailer",
                                    [&] {
                                      scalar_t* out = trailer.mutable_data_ptr<scalar_t>();
                                      for (const int64_t parameter : reported_)
                                        *out++ = scalar_t(is_used(parameter) ? 1.0F : 0.0F);
                                      for (int i = 0; i < facts_; ++i)
                                        *out++ = scalar_t((facts >> i) & 1U ? 1.0F : 0.0F);
                                    });
    return;
  }
  // One kernel, and one more for each number that is not as usual: parameters are used, facts do
  // not hold.
  if (mask_numel() > 0) trailer.narrow(0, 0, mask_numel()).fill_(1.0);
  for (int64_t i = 0; i < mask_numel(); ++i) {
    if (!is_used(reported_[i])) trailer.select(0, i).zero_();
  }
  if (facts_ > 0) trailer.narrow(0, mask_numel(), facts_).zero_();
  for (int i = 0; i < facts_; ++i) {
    if ((facts >> i) & 1U) trailer.select(0, mask_numel() + i).fill_(1.0);
  }
}

void BucketTrailer::read_used(const at::Tensor& trailer, std::vector<uint8_t>& used_by_any) const {
  const std::vector<uint8_t> used = above_zero(trailer.narrow(0, 0, mask_numel()));
  for (size_t i = 0; i < used.size(); ++i) used_by_any[reported_[i]] |= used[i];
}

uint32_t BucketTrailer::read_facts(const at::Tensor& trailer) const {
  const std::vector<uint8_t> seen = above_zero(trailer.narrow(0, mask_numel(), facts_));
  uint32_t facts = 0;
  for (size_t i = 0; i < seen.size(); ++i) facts |= static_cast<uint32_t>(seen[i]) << i;
  return facts;
}

}  // namespace apex::parallel::detail
