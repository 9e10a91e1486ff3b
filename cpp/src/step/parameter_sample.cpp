// SPDX-License-Identifier: BSD-3-Clause
#include "step/parameter_sample.h"

#include <algorithm>
#include <cmath>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "fingerprint.h"

namespace apex::parallel {

namespace {

/// The index of sample `number` of `taken` evenly spaced samples of `count` items. The first and
/// the last item are included.
int64_t spread(size_t number, size_t taken, int64_t count) {
  if (taken == 1) return 0;
  return static_cast<int64_t>(number) * (count - 1) / static_cast<int64_t>(taken - 1);
}

template <typename Scalar, size_t N>
void read_as(const void* memory, const std::array<int64_t, N>& offsets, size_t count,
             std::array<double, N>& values) {
  const auto* const elements = static_cast<const Scalar*>(memory);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<double>(elements[offsets[i]]);
}

}  // namespace

/// Null if the elements of the parameter cannot be read in place.
const void* ParameterSample::memory_of(const at::Tensor& parameter) {
  // Checks dispatch keys, which is cheaper in every step than checks of device and layout. The CPU
  // key implies a strided tensor. A wrapper subclass has no memory, whatever its device is.
  const c10::TensorImpl& impl = *parameter.unsafeGetTensorImpl();
  if (!impl.key_set().has(c10::DispatchKey::CPU) || impl.key_set().has(c10::DispatchKey::Python) ||
      !impl.is_non_overlapping_and_dense()) {
    return nullptr;
  }
  const c10::Storage& storage = impl.unsafe_storage();
  const auto* const start = storage ? static_cast<const char*>(storage.data()) : nullptr;
  return start == nullptr ? nullptr : start + impl.storage_offset() * impl.dtype().itemsize();
}

bool ParameterSample::read(const Site& site, std::array<double, kElements>& values) {
  const at::Tensor& parameter = site.parameter;
  if (parameter.scalar_type() != site.dtype || parameter.numel() != site.numel) return false;
  const void* const memory = memory_of(parameter);
  if (memory == nullptr) return false;
  switch (site.dtype) {
    case at::kFloat:
    case at::kComplexFloat:
      read_as<float>(memory, site.offsets, site.count, values);
      return true;
    case at::kDouble:
    case at::kComplexDouble:
      read_as<double>(memory, site.offsets, site.count, values);
      return true;
    case at::kHalf:
      read_as<c10::Half>(memory, site.offsets, site.count, values);
      return true;
    case at::kBFloat16:
      read_as<c10::BFloat16>(memory, site.offsets, site.count, values);
      return true;
    default:
      return false;
  }
}

void ParameterSample::watch(const std::vector<at::Tensor>& parameters) {
  sites_.clear();
  const size_t taken = std::min(kParameters, parameters.size());
  for (size_t i = 0; i < taken; ++i) {
    Site site;
    site.parameter = parameters[spread(i, taken, static_cast<int64_t>(parameters.size()))];
    site.dtype = site.parameter.scalar_type();
    site.numel = site.parameter.numel();
    const int64_t numbers = site.parameter.is_complex() ? 2 * site.numel : site.numel;
    site.count = static_cast<size_t>(std::min<int64_t>(kElements, numbers));
    for (size_t e = 0; e < site.count; ++e) site.offsets[e] = spread(e, site.count, numbers);
    if (site.count > 0 && read(site, site.values)) sites_.push_back(std::move(site));
  }
}

ParameterSample::Change ParameterSample::take() {
  Change change;
  for (Site& site : sites_) {
    std::array<double, kElements> now{};
    if (!read(site, now)) continue;
    if (now == site.values) continue;
    for (size_t e = 0; e < site.count; ++e) {
      if (now[e] == site.values[e]) continue;
      const double distance = std::abs(now[e] - site.values[e]);
      // A NaN that is still a NaN counts as unchanged.
      change.any = change.any || !std::isnan(now[e]) || !std::isnan(site.values[e]);
      change.distance += distance;
    }
    site.values = now;
  }
  return change;
}

int64_t ParameterSample::fingerprint() const {
  if (sites_.empty()) return 0;
  Fingerprint all;
  for (const Site& site : sites_) all.add(site.values.data(), sizeof(site.values));
  return all.value() | 1;
}

}  // namespace apex::parallel
