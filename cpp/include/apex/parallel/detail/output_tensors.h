// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <iterator>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>

/// Finds the tensors in the result of a module's forward: a tensor, or nested tuples, pairs,
/// optionals and containers of tensors. To support your own type, define `void
/// collect_tensors(const YourType&, std::vector<at::Tensor>&)` in its namespace.

namespace apex::parallel {

namespace detail {

template <typename T, typename = void>
struct IsCollected : std::false_type {};
template <typename T>
struct IsCollected<T, std::void_t<decltype(collect_tensors(
                          std::declval<const T&>(), std::declval<std::vector<at::Tensor>&>()))>>
    : std::true_type {};

template <typename T, typename = void>
struct IsTuple : std::false_type {};
template <typename T>
struct IsTuple<T, std::void_t<decltype(std::tuple_size<T>::value)>> : std::true_type {};

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

/// A container whose elements have another type, which excludes paths.
template <typename T, typename = void>
struct IsRange : std::false_type {};
template <typename T>
struct IsRange<T, std::void_t<decltype(*std::begin(std::declval<const T&>()))>>
    : std::negation<
          std::is_same<std::decay_t<decltype(*std::begin(std::declval<const T&>()))>, T>> {};

/// Ignores a type without tensors.
template <typename T>
void collect(const T& value, std::vector<at::Tensor>& tensors) {
  if constexpr (std::is_base_of_v<at::Tensor, T>) {
    tensors.push_back(value);
  } else if constexpr (IsCollected<T>::value) {
    collect_tensors(value, tensors);
  } else if constexpr (IsTuple<T>::value) {
    std::apply([&](const auto&... item) { (collect(item, tensors), ...); }, value);
  } else if constexpr (IsOptional<T>::value) {
    if (value) collect(*value, tensors);
  } else if constexpr (IsRange<T>::value) {
    for (const auto& item : value) collect(item, tensors);
  }
}

}  // namespace detail

/// All tensors in `value`, in order.
template <typename T>
std::vector<at::Tensor> output_tensors(const T& value) {
  std::vector<at::Tensor> tensors;
  detail::collect(value, tensors);
  return tensors;
}

}  // namespace apex::parallel
