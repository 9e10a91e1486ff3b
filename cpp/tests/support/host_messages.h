// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Messages for sums over two hosts, and their expected results. Oracles: sums of the ranks of each
/// host in their order, and of the two hosts, bit for bit; and float64.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace apex::testing {

/// The host of each rank.
using Places = std::vector<int>;

using Op = c10d::ReduceOp::RedOpType;

/// A message that is the same on every rank except for its values.
struct HostMessage {
  Op op = Op::SUM;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  uint64_t seed = 0;
  bool in_shared = false;
};

inline at::Tensor values(const HostMessage& one, int rank) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(one.seed * 1000 + static_cast<uint64_t>(rank));
  const at::TensorOptions wide(at::kDouble);
  if (at::isIntegralType(one.dtype, false))
    return at::randint(0, 20, {one.numel}, generator, at::TensorOptions(at::kLong)).to(one.dtype);
  if (at::isComplexType(one.dtype))
    return at::view_as_complex(at::randn({one.numel, 2}, generator, wide)).to(one.dtype);
  return at::randn({one.numel}, generator, wide).to(one.dtype);
}

/// Combines the inputs of ranks or hosts in their order.
inline at::Tensor combined(const std::vector<at::Tensor>& inputs, Op op) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto computed = [&](const at::Tensor& one) { return narrow ? one.to(at::kFloat) : one; };
  at::Tensor sum = computed(inputs[0]).clone();
  for (size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor more = computed(inputs[i]);
    if (op == Op::MAX) sum = at::maximum(sum, more);
    if (op == Op::MIN) sum = at::minimum(sum, more);
    if (op == Op::SUM) sum.add_(more);
  }
  return sum.to(dtype);
}

/// The expected result: combines the ranks of each host, then the hosts.
inline at::Tensor reference(const HostMessage& one, const Places& places) {
  std::map<int, std::vector<at::Tensor>> of_ranks;  // by host
  for (size_t rank = 0; rank < places.size(); ++rank)
    of_ranks[places[rank]].push_back(values(one, static_cast<int>(rank)));
  std::vector<at::Tensor> of_hosts;
  for (const auto& [host, inputs] : of_ranks) of_hosts.push_back(combined(inputs, one.op));
  return combined(of_hosts, one.op);
}

/// Maximum error against float64, relative to the largest possible value.
inline double error_of(const at::Tensor& result, const HostMessage& one, const Places& places) {
  if (one.numel == 0) return 0;
  HostMessage exact = one;
  std::vector<at::Tensor> inputs;
  const bool complex = at::isComplexType(one.dtype);
  const at::ScalarType wide = complex ? at::kComplexDouble : at::kDouble;
  for (size_t rank = 0; rank < places.size(); ++rank)
    inputs.push_back(values(exact, static_cast<int>(rank)).to(wide));
  const at::Tensor sum = combined(inputs, one.op);
  double largest = 1e-30;
  for (const at::Tensor& input : inputs)
    largest = std::max(largest, input.abs().max().item<double>());
  return (result.to(wide) - sum).abs().max().item<double>() /
         (largest * static_cast<double>(places.size()));
}

inline double tolerance(at::ScalarType dtype) {
  if (dtype == at::kHalf) return 2e-3;
  if (dtype == at::kBFloat16) return 1.6e-2;
  return dtype == at::kFloat || dtype == at::kComplexFloat ? 1e-6 : 1e-13;
}

inline HostMessage draw(std::mt19937_64& random) {
  constexpr at::ScalarType kTypes[] = {
      at::kFloat, at::kDouble,       at::kHalf,  at::kBFloat16, at::kLong,         at::kInt,
      at::kByte,  at::kComplexFloat, at::kFloat, at::kFloat,    at::kComplexDouble};
  constexpr Op kOps[] = {Op::SUM, Op::SUM, Op::SUM, Op::MAX, Op::MIN};
  constexpr int64_t kSizes[] = {0,    1,    2,     3,     7,     63,     64,    65,
                                1000, 4097, 16384, 16385, 32769, 100003, 300007};
  for (;;) {
    HostMessage one;
    one.op = kOps[random() % 5];
    one.dtype = kTypes[random() % 11];
    one.numel = random() % 3 == 0 ? static_cast<int64_t>(random() % 50000) : kSizes[random() % 15];
    one.seed = random() % 1000000;
    one.in_shared = random() % 2 == 0;
    if (!at::isComplexType(one.dtype) || one.op == Op::SUM) return one;
  }
}

/// @throws std::runtime_error if `result` is not the sum.
inline void check(const at::Tensor& result, const HostMessage& one, const Places& places) {
  const std::string text = std::string(c10::toString(one.dtype)) + ", " +
                           std::to_string(one.numel) + " elements, operation " +
                           std::to_string(static_cast<int>(one.op));
  const at::Tensor expected = reference(one, places);
  if (one.numel > 0 &&
      std::memcmp(result.const_data_ptr(), expected.const_data_ptr(), result.nbytes()) != 0)
    throw std::runtime_error("other bits: " + text);
  if (!(error_of(result, one, places) < tolerance(one.dtype)))
    throw std::runtime_error("far from float64: " + text);
}

}  // namespace apex::testing
