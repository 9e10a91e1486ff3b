// SPDX-License-Identifier: BSD-3-Clause
// Oracle: the same arithmetic in the default floating-point mode, bit for bit.

#include "comm/received_values.h"

#include <cfenv>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "floating_point_mode.h"

namespace apex::parallel {
namespace {

const std::function<void()> kModes[] = {
    [] { at::globalContext().setFlushDenormal(true); },
    [] { std::fesetround(FE_UPWARD); },
};

/// On a separate thread, whose mode ends with it.
void in_each_mode(const std::function<void()>& body) {
  for (const auto& set_mode : kModes) {
    std::thread([&] {
      set_mode();
      body();
    }).join();
  }
}

volatile float tiny = 1e-38F, three = 3.0F, ten = 10.0F;

/// Two results, compared as bits, since denormals may equal zero in such a mode.
struct Results {
  uint32_t half_of_tiny, third;

  static Results compute() {
    const volatile float results[] = {tiny / 2.0F, ten / three};
    Results bits{};
    std::memcpy(&bits, const_cast<const float*>(results), sizeof(bits));
    return bits;
  }
  bool operator==(const Results& other) const {
    return half_of_tiny == other.half_of_tiny && third == other.third;
  }
};

TEST(DefaultFloatingPointMode, InAnyMode_ComputesInTheDefault_AndRestores) {
  const Results expected = Results::compute();
  in_each_mode([&] {
    const Results before = Results::compute();
    EXPECT_FALSE(before == expected) << "the mode does nothing";
    {
      const DefaultFloatingPointMode mode;
      EXPECT_TRUE(Results::compute() == expected);
      {
        const DefaultFloatingPointMode nested;
      }
      EXPECT_TRUE(Results::compute() == expected);
    }
    EXPECT_TRUE(Results::compute() == before);
  });
}

// Threads inherit the mode of the thread that starts them.
TEST(ChangeReceived, InAnyMode_OnSeveralThreads_IsTheDefaultsResult) {
  const at::Tensor values = (at::rand({500, 400}, at::kDouble) * 1e-38).to(at::kFloat);
  const auto change = [](const at::Tensor& part) { part.mul_(1.0 / 3.0); };
  at::Tensor expected = values.clone();
  change_received(expected, change);
  EXPECT_TRUE(at::allclose(expected.to(at::kDouble) * 3.0, values.to(at::kDouble), 1e-5, 1e-44));
  const int before = at::get_num_threads();
  in_each_mode([&] {
    at::set_num_threads(3);
    at::Tensor transposed = values.t().clone(at::MemoryFormat::Preserve);
    change_received(transposed, change);
    EXPECT_TRUE(transposed.t().contiguous().view(at::kInt).equal(expected.view(at::kInt)));
  });
  at::set_num_threads(before);
}

/// The factor is not rounded to the dtype, which would bias all averages.
TEST(ScaleInPlace, LowPrecision_RoundsTheProductsOnly) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    for (const int ranks : {3, 7, 1000}) {
      for (const int64_t numel : {1, 77, 4096}) {  // with and without vectors
        const at::Tensor values = at::randn({numel}).to(dtype);
        const at::Tensor scaled = values.clone();
        scale_in_place(scaled, 1.0 / ranks);
        const at::Tensor expected = values.to(at::kFloat).mul(1.0 / ranks).to(dtype);
        EXPECT_TRUE(scaled.equal(expected)) << dtype << ", " << ranks << " ranks, " << numel;
      }
    }
  }
}

}  // namespace
}  // namespace apex::parallel
