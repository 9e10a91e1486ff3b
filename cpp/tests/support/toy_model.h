// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/reducer.h>

namespace apex::testing {

/// A multilayer perceptron as a list of parameters. Small enough for a float64 reference, large
/// enough to fill several buckets. Without torch::nn, whose headers take half a minute to compile.
struct ToyModel {
  std::vector<apex::parallel::NamedTensor> parameters;

  /// Layers of the given widths: 'fc0.weight', 'fc0.bias', 'fc1.weight', ...
  static ToyModel mlp(const std::vector<int64_t>& widths, uint64_t seed,
                      at::ScalarType dtype = at::kFloat);

  at::Tensor& operator[](size_t index) { return parameters[index].tensor; }
  const at::Tensor& operator[](size_t index) const { return parameters[index].tensor; }
  size_t size() const { return parameters.size(); }

  /// tanh between the layers; rows of x are samples.
  at::Tensor forward(const at::Tensor& x) const;

  /// Independent leaves with the same values, in another dtype or on another device.
  ToyModel clone(const at::TensorOptions& options) const;

  void zero_grad();
  void sgd_step(double learning_rate);
};

/// Seeded inputs, the same on every rank; rank r of w takes rows [r*n/w, (r+1)*n/w).
at::Tensor random_batch(int64_t rows, int64_t columns, uint64_t seed);
at::Tensor rows_of_rank(const at::Tensor& batch, int rank, int world);

/// Largest |a-b| relative to the largest |b|; 0 if both are undefined, infinity if one is.
double relative_error(const at::Tensor& a, const at::Tensor& b);

}  // namespace apex::testing
