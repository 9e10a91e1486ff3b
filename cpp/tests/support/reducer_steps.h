// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include <apex/parallel/reducer.h>
#include <support/toy_model.h>

namespace apex::testing {

/// Buckets of `cap` elements; 1: a bucket per parameter.
inline parallel::ReducerOptions small_buckets(int64_t cap = 1, bool views = false) {
  parallel::ReducerOptions options;
  options.limits.cap = cap;
  options.gradient_as_bucket_view = views;
  return options;
}

inline at::Tensor loss_of(const at::Tensor& y) {
  return at::isComplexType(y.scalar_type()) ? at::real(y * y.conj()).mean() : y.square().mean();
}

/// A backward as in a training loop. Gradients are not cleared.
inline void backward(parallel::Reducer& reducer, const ToyModel& model, const at::Tensor& x) {
  reducer.prepare_for_forward();
  const at::Tensor y = model.forward(x);
  reducer.watch_outputs({y});
  loss_of(y).backward();
}

/// The message of the exception that `call` throws, which must be an `Exception`.
template <typename Exception>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    EXPECT_NE(dynamic_cast<const Exception*>(&error), nullptr)
        << "another exception: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no exception";
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

}  // namespace apex::testing
