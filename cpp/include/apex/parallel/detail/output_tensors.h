// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

/// Finds the tensors in the result of a module's forward: a tensor, or nested tuples, pairs,
/// arrays, vectors, optionals and maps of tensors. To support your own type, define `void
/// collect_tensors(const YourType&, std::vector<at::Tensor>&)` in its namespace.

namespace apex::parallel {

namespace detail {

template <typename T>
void collect(const T& value, std::vector<at::Tensor>& tensors);

/// Fallback: a type without tensors.
template <typename T>
auto collect_own(const T&, std::vector<at::Tensor>&, long) -> void {}

template <typename T>
auto collect_own(const T& value, std::vector<at::Tensor>& tensors, int)
    -> decltype(collect_tensors(value, tensors), void()) {
  collect_tensors(value, tensors);
}

template <typename T>
struct Collector {
  static void run(const T& value, std::vector<at::Tensor>& tensors) {
    collect_own(value, tensors, 0);
  }
};

template <>
struct Collector<at::Tensor> {
  static void run(const at::Tensor& value, std::vector<at::Tensor>& tensors) {
    tensors.push_back(value);
  }
};

template <typename... Ts>
struct Collector<std::tuple<Ts...>> {
  static void run(const std::tuple<Ts...>& value, std::vector<at::Tensor>& tensors) {
    std::apply([&](const auto&... item) { (collect(item, tensors), ...); }, value);
  }
};

template <typename A, typename B>
struct Collector<std::pair<A, B>> {
  static void run(const std::pair<A, B>& value, std::vector<at::Tensor>& tensors) {
    collect(value.first, tensors);
    collect(value.second, tensors);
  }
};

template <typename T>
struct Collector<std::optional<T>> {
  static void run(const std::optional<T>& value, std::vector<at::Tensor>& tensors) {
    if (value) collect(*value, tensors);
  }
};

template <typename Range>
struct RangeCollector {
  static void run(const Range& range, std::vector<at::Tensor>& tensors) {
    for (const auto& item : range) collect(item, tensors);
  }
};

template <typename T, typename A>
struct Collector<std::vector<T, A>> : RangeCollector<std::vector<T, A>> {};
template <typename T, size_t N>
struct Collector<std::array<T, N>> : RangeCollector<std::array<T, N>> {};
template <typename K, typename T, typename C, typename A>
struct Collector<std::map<K, T, C, A>> : RangeCollector<std::map<K, T, C, A>> {};
template <typename K, typename T, typename H, typename E, typename A>
struct Collector<std::unordered_map<K, T, H, E, A>>
    : RangeCollector<std::unordered_map<K, T, H, E, A>> {};

template <typename T>
void collect(const T& value, std::vector<at::Tensor>& tensors) {
  Collector<T>::run(value, tensors);
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
