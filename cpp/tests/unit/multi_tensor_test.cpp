// SPDX-License-Identifier: BSD-3-Clause
// Oracle: torch's conversion, and identical bits without one.

#include "reducer/multi_tensor.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <support/test_seed.h>

namespace apex::parallel {
namespace {

constexpr at::ScalarType kRealDtypes[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16};

at::Tensor random_values(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes, at::isComplexType(dtype) ? at::kComplexDouble : at::kDouble).to(dtype);
}

struct Arrangement {
  const char* name;
  at::Tensor (*of)(const at::Tensor& values);  ///< same values, another memory layout
};

const Arrangement kArrangements[] = {
    {"contiguous", [](const at::Tensor& t) { return t.contiguous(); }},
    {"channels last",
     [](const at::Tensor& t) { return t.contiguous(at::MemoryFormat::ChannelsLast); }},
    {"transposed",
     [](const at::Tensor& t) { return t.transpose(0, 3).contiguous().transpose(0, 3); }},
    {"with gaps",
     [](const at::Tensor& t) {
       at::Tensor wide = at::full({2, 3, 4, 10}, 7, t.options());
       at::Tensor part = wide.slice(3, 0, 10, 2);
       return part.copy_(t);
     }},
};

// Tensors that one path handles are removed from the list of the others: results must not shift.
TEST(MultiTensorCopy, EveryDtypeAndLayout_OneCall_IsTheSource) {
  at::manual_seed(testing::fresh_seed());
  std::vector<at::Tensor> targets, sources;
  for (const at::ScalarType from : kRealDtypes) {
    sources.insert(sources.end(), {at::_neg_view(random_values({3}, from)), at::empty({0, 2})});
    targets.insert(targets.end(), {at::zeros({3}, from), at::empty({0, 2})});
    for (const at::ScalarType to : kRealDtypes) {
      for (const Arrangement& there : kArrangements) {
        for (const Arrangement& here : kArrangements) {
          sources.push_back(there.of(random_values({2, 3, 4, 5}, from)));
          targets.push_back(here.of(at::full({2, 3, 4, 5}, NAN, to)));
        }
      }
    }
  }
  multi_tensor_copy(targets, sources);
  for (size_t i = 0; i < targets.size(); ++i)
    EXPECT_TRUE(targets[i].equal(sources[i].to(targets[i].scalar_type()))) << i;
}

// Their memory holds other numbers than their values.
TEST(MultiTensorCopy, ConjugatedAndNegated_CopyTheirValueAndNotTheirMemory) {
  at::manual_seed(testing::fresh_seed());
  const at::Tensor z = random_values({4, 3}, at::kComplexDouble);
  const at::Tensor x = random_values({4, 3}, at::kDouble);
  const at::Tensor base = at::zeros({4, 3}, at::kComplexDouble);
  const at::Tensor opposite = at::zeros({4, 3}, at::kDouble);
  std::vector<at::Tensor> targets{at::zeros({4, 3}, at::kComplexDouble),
                                  at::zeros({4, 3}, at::kDouble), at::conj(base),
                                  at::_neg_view(opposite), at::zeros({4, 3}, at::kComplexFloat)};
  const std::vector<at::Tensor> sources{at::conj(z), at::_neg_view(x), z, x, at::conj(z)};
  multi_tensor_copy(targets, sources);
  EXPECT_TRUE(targets[0].equal(z.conj().resolve_conj()));
  EXPECT_TRUE(targets[1].equal(-x));
  EXPECT_TRUE(base.equal(z.conj().resolve_conj()));
  EXPECT_TRUE(opposite.equal(-x));
  EXPECT_TRUE(at::allclose(targets[4].to(at::kComplexDouble), z.conj(), 1e-6, 1e-6));
}

// Any arithmetic turns a signalling NaN into a quiet one.
TEST(MultiTensorCopy, NaNsKeepTheirBits) {
  const at::Tensor bits =
      at::tensor({int64_t{0x7fa00001}, int64_t{0xffc12345}, int64_t{0x80000000}}, at::kLong)
          .to(at::kInt);
  const at::Tensor target = at::zeros({3});
  multi_tensor_copy({target}, {bits.view(at::kFloat)});
  EXPECT_TRUE(target.view(at::kInt).equal(bits));
}

}  // namespace
}  // namespace apex::parallel
