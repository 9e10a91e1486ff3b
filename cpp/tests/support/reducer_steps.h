// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <exception>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include <apex/parallel/reducer.h>
#include <support/toy_model.h>

namespace apex::testing {

inline at::Tensor forward(apex::parallel::Reducer& reducer, const ToyModel& model,
                          const at::Tensor& x) {
  reducer.prepare_for_forward();
  const at::Tensor y = model.forward(x);
  reducer.watch_outputs({y});
  return y;
}

/// A rank's input in a step; differs between ranks.
inline at::Tensor batch(int rank, int number) { return random_batch(5, 4, 10 * number + rank); }

inline at::Tensor loss_of(const at::Tensor& output) { return output.square().mean(); }

/// Compares gradients with the gradients of `sum`, which accumulated those of all ranks, divided by
/// `world`.
inline void expect_mean_of(const ToyModel& model, const ToyModel& sum, int world,
                           const std::string& where) {
  for (size_t i = 0; i < model.size(); ++i) {
    EXPECT_LT(relative_error(model[i].grad(), sum[i].grad() / world), 1e-5)
        << where << ", " << model.parameters[i].name;
  }
}

/// Compares gradients with the average over the ranks' batches of this step, in float64.
inline void expect_average(const ToyModel& model, int world, int number, const std::string& where) {
  ToyModel reference = model.clone(at::kDouble);
  for (int rank = 0; rank < world; ++rank) {
    loss_of(reference.forward(batch(rank, number).to(at::kDouble))).backward();
  }
  expect_mean_of(model, reference, world, where + ", step " + std::to_string(number));
}

/// what() of the exception that `call` throws, or "".
inline std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace apex::testing
