// SPDX-License-Identifier: BSD-3-Clause
#include "step/parameter_sample.h"

#include <algorithm>
#include <cmath>

#include <ATen/Dispatch.h>
#include <ATen/Functions.h>

#include "fingerprint.h"
#include "tensor_memory.h"

namespace apex::parallel {

namespace {

/// The index of sample `number` of `taken` evenly spaced samples of `count` items. The first and
/// the last item are included.
int64_t spread(size_t number, size_t taken, int64_t count) {
  if (taken == 1) return 0;
  return static_cast<int64_t>(number) * (count - 1) / static_cast<int64_t>(taken - 1);
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

bool ParameterSample::read(const Site& site, Values& values) {
  const void* const memory = memory_of(site.parameter);
  if (memory == nullptr) return false;
  const at::ScalarType real = c10::toRealValueType(site.dtype);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, real, "sample", [&] {
    const auto* const elements = static_cast<const scalar_t*>(memory);
    for (size_t i = 0; i < site.count; ++i)
      values[i] = static_cast<double>(elements[site.offsets[i]]);
  });
  return true;
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
    if (site.count == 0 || !has_memory(site.parameter)) continue;
    if (!site.parameter.is_cpu()) {
      site.on_device = at::tensor(at::ArrayRef<int64_t>(site.offsets.data(), site.count), at::kLong)
                           .to(site.parameter.device());
    }
    sites_.push_back(std::move(site));
  }
  take();
}

/// The present values of each site; none if its parameter has changed its kind.
std::vector<std::optional<ParameterSample::Values>> ParameterSample::read_all() const {
  std::vector<std::optional<Values>> all(sites_.size());
  std::vector<at::Tensor> on_devices;
  std::vector<size_t> of_sites;
  for (size_t i = 0; i < sites_.size(); ++i) {
    const Site& site = sites_[i];
    const at::Tensor& parameter = site.parameter;
    if (parameter.scalar_type() != site.dtype || parameter.numel() != site.numel) continue;
    if (!site.on_device.defined()) {
      Values values{};
      if (read(site, values)) all[i] = values;
    } else if (parameter.device() == site.on_device.device()) {
      const at::Tensor plain = parameter.detach();
      on_devices.push_back((plain.is_complex() ? at::view_as_real(plain) : plain)
                               .take(site.on_device)
                               .to(at::kDouble));
      of_sites.push_back(i);
    }
  }
  if (on_devices.empty()) return all;
  for (at::Tensor& values : on_devices) values = values.to(on_devices.front().device());
  const at::Tensor values = at::cat(on_devices).cpu();  // one wait for all sites
  const double* from = values.const_data_ptr<double>();
  for (const size_t i : of_sites) {
    std::copy_n(from, sites_[i].count, all[i].emplace(Values{}).begin());
    from += sites_[i].count;
  }
  return all;
}

double ParameterSample::take() {
  double distance = 0;
  const std::vector<std::optional<Values>> all = read_all();
  for (size_t i = 0; i < sites_.size(); ++i) {
    Site& site = sites_[i];
    if (!all[i] || *all[i] == site.values) continue;
    for (size_t e = 0; e < site.count; ++e) {
      const double now = (*all[i])[e], last = site.values[e];
      // A NaN that is still a NaN counts as unchanged.
      if (now != last && !(std::isnan(now) && std::isnan(last))) distance += std::abs(now - last);
    }
    site.values = *all[i];
  }
  return distance;
}

int64_t ParameterSample::fingerprint() const {
  if (sites_.empty()) return 0;
  Fingerprint all;
  for (const Site& site : sites_) all.add(site.values.data(), sizeof(site.values));
  return all.value() | 1;
}

}  // namespace apex::parallel
