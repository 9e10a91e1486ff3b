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
  trailer.copy_(usual(trailer.options()));
  std::vector<at::Tensor> zeros;
  append_unused(trailer, used, zeros);
  if (!zeros.empty()) at::_foreach_zero_(zeros);
  write_facts(trailer, facts);
}

at::Tensor BucketTrailer::usual(const at::TensorOptions& options) const {
  const at::Tensor numbers = at::zeros({numel()}, options);
  numbers.narrow(0, 0, mask_numel()).fill_(1.0);
  return numbers;
}

void BucketTrailer::append_unused(const at::Tensor& trailer, const std::vector<uint8_t>& used,
                                  std::vector<at::Tensor>& zeros) const {
  if (used.empty() && mask_numel() > 0) zeros.push_back(trailer.narrow(0, 0, mask_numel()));
  if (used.empty()) return;
  for (int64_t i = 0; i < mask_numel(); ++i) {
    if (used[reported_[i]] == 0) zeros.push_back(trailer.select(0, i));
  }
}

void BucketTrailer::write_facts(const at::Tensor& trailer, uint32_t facts) const {
  for (int i = 0; i < facts_; ++i) {
    if ((facts >> i) & 1U) trailer.select(0, mask_numel() + i).fill_(1.0);
  }
}

int64_t BucketTrailer::read_used(const std::vector<const BucketTrailer*>& trailers,
                                 const std::vector<at::Tensor>& sums,
                                 std::vector<uint8_t>& used_by_any) {
  const BelowAutograd guard;
  int64_t reads = 0;
  const auto add = [&](const BucketTrailer& trailer, const at::Tensor& mask) {
    const std::vector<uint8_t> used = above_zero(mask);
    for (size_t i = 0; i < used.size(); ++i) used_by_any[trailer.reported_[i]] |= used[i];
  };
  std::vector<const BucketTrailer*> elsewhere;  // on a device
  std::vector<at::Tensor> masks;
  for (size_t i = 0; i < trailers.size(); ++i) {
    const at::Tensor mask = sums[i].narrow(0, 0, trailers[i]->mask_numel());
    if (mask.is_cpu()) {
      add(*trailers[i], mask);
      ++reads;
    } else {
      elsewhere.push_back(trailers[i]);
      masks.push_back(mask.to(at::kFloat));
    }
  }
  if (masks.empty()) return reads;
  const at::Tensor all = (masks.size() == 1 ? masks[0] : at::cat(masks)).cpu();
  int64_t begin = 0;
  for (const BucketTrailer* trailer : elsewhere) {
    add(*trailer, all.narrow(0, begin, trailer->mask_numel()));
    begin += trailer->mask_numel();
  }
  return reads + 1;
}

uint32_t BucketTrailer::read_facts(const at::Tensor& trailer) const {
  const std::vector<uint8_t> seen = above_zero(trailer.narrow(0, mask_numel(), facts_));
  uint32_t facts = 0;
  for (size_t i = 0; i < seen.size(); ++i) facts |= static_cast<uint32_t>(seen[i]) << i;
  return facts;
}

}  // namespace apex::parallel::detail
