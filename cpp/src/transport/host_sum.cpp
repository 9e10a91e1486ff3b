// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_sum.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <apex/error.h>

#include "floating_point_mode.h"

namespace apex::parallel {

namespace {

using Op = c10d::ReduceOp::RedOpType;

/// Elements per block of a thread; fits the L1 cache.
constexpr int64_t kBlock = 2048;
/// Minimum work per thread.
constexpr int64_t kGrainBytes = int64_t{256} << 10;

template <typename Stored>
using Computed =
    std::conditional_t<std::is_same_v<Stored, c10::Half> || std::is_same_v<Stored, c10::BFloat16>,
                       float, Stored>;

template <Op op, typename Value>
Value combined(Value left, Value right) {
  // NaN wins. Gloo's comparison is inconsistent about it.
  if constexpr (op == Op::MAX) return right > left || right != right ? right : left;
  if constexpr (op == Op::MIN) return right < left || right != right ? right : left;
  if constexpr (op == Op::PRODUCT) return static_cast<Value>(left * right);
  if constexpr (op == Op::BAND) return static_cast<Value>(left & right);
  if constexpr (op == Op::BOR) return static_cast<Value>(left | right);
  if constexpr (op == Op::BXOR) return static_cast<Value>(left ^ right);
  return static_cast<Value>(left + right);
}

constexpr bool is_bitwise(Op op) { return op == Op::BAND || op == Op::BOR || op == Op::BXOR; }

template <Op op, typename Stored>
void combine_block(int64_t begin, int64_t numel, const std::vector<const char*>& from,
                   const std::vector<char*>& to) {
  using Value = Computed<Stored>;
  alignas(64) Value sum[kBlock];
  const auto at = [&](const char* of) { return reinterpret_cast<const Stored*>(of) + begin; };
  const Stored* first = at(from.front());
  for (int64_t i = 0; i < numel; ++i) sum[i] = static_cast<Value>(first[i]);
  for (size_t rank = 1; rank < from.size(); ++rank) {
    const Stored* more = at(from[rank]);
    for (int64_t i = 0; i < numel; ++i) sum[i] = combined<op>(sum[i], static_cast<Value>(more[i]));
  }
  if constexpr (op == Op::AVG) {
    const auto ranks = static_cast<Value>(from.size());
    if ((from.size() & (from.size() - 1)) == 0) {  // 1 / ranks is exact, and faster
      for (int64_t i = 0; i < numel; ++i) sum[i] *= Value(1) / ranks;
    } else {
      for (int64_t i = 0; i < numel; ++i) sum[i] /= ranks;
    }
  }
  if constexpr (!std::is_same_v<Value, Stored>) {
    auto* out = reinterpret_cast<Stored*>(to.front()) + begin;
    for (int64_t i = 0; i < numel; ++i) out[i] = static_cast<Stored>(sum[i]);
    for (size_t i = 1; i < to.size(); ++i)
      std::memcpy(reinterpret_cast<Stored*>(to[i]) + begin, out, numel * sizeof(Stored));
  } else {
    for (char* one : to)
      std::memcpy(reinterpret_cast<Stored*>(one) + begin, sum, numel * sizeof(Stored));
  }
}

template <Op op, typename Stored>
void combine_as(int64_t numel, const std::vector<const char*>& from, const std::vector<char*>& to) {
  const int64_t blocks = (numel + kBlock - 1) / kBlock;
  const auto part = [&](int64_t first, int64_t end) {
    // Each rank sums its part, and every rank sums small messages.
    const DefaultFloatingPointMode mode;
    for (int64_t block = first; block < end; ++block) {
      const int64_t begin = block * kBlock;
      combine_block<op, Stored>(begin, std::min(kBlock, numel - begin), from, to);
    }
  };
  const int64_t grain = kGrainBytes / static_cast<int64_t>(sizeof(Stored)) / kBlock;
  if (blocks <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) {
    part(0, blocks);
  } else {
    at::parallel_for(0, blocks, grain, part);
  }
}

template <Op op>
void combine_op(at::ScalarType dtype, int64_t numel, const std::vector<const char*>& from,
                const std::vector<char*>& to) {
  const auto run = [&](auto zero) { combine_as<op, decltype(zero)>(numel, from, to); };
  if constexpr (op == Op::AVG) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "combine",
                                    [&] { run(scalar_t()); });
  } else if constexpr (is_bitwise(op)) {
    AT_DISPATCH_INTEGRAL_TYPES(dtype, "combine", [&] { run(scalar_t()); });
  } else {
    AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "combine",
                               [&] { run(scalar_t()); });
  }
}

}  // namespace

bool can_combine(Op op, at::ScalarType dtype) {
  const bool floats =
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
  const bool integers = dtype == at::kLong || dtype == at::kInt || dtype == at::kShort ||
                        dtype == at::kChar || dtype == at::kByte;
  if (op == Op::AVG) return floats;
  if (is_bitwise(op)) return integers;
  return (op == Op::SUM || op == Op::MAX || op == Op::MIN || op == Op::PRODUCT) &&
         (floats || integers);
}

void combine(Op op, at::ScalarType dtype, int64_t numel, const std::vector<const char*>& from,
             const std::vector<char*>& to) {
  switch (op) {
    case Op::SUM:
      return combine_op<Op::SUM>(dtype, numel, from, to);
    case Op::AVG:
      return combine_op<Op::AVG>(dtype, numel, from, to);
    case Op::MAX:
      return combine_op<Op::MAX>(dtype, numel, from, to);
    case Op::MIN:
      return combine_op<Op::MIN>(dtype, numel, from, to);
    case Op::PRODUCT:
      return combine_op<Op::PRODUCT>(dtype, numel, from, to);
    case Op::BAND:
      return combine_op<Op::BAND>(dtype, numel, from, to);
    case Op::BOR:
      return combine_op<Op::BOR>(dtype, numel, from, to);
    case Op::BXOR:
      return combine_op<Op::BXOR>(dtype, numel, from, to);
    default:
      throw Error("combine(): this operation is not supported");
  }
}

}  // namespace apex::parallel
