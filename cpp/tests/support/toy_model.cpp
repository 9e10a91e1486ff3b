// SPDX-License-Identifier: BSD-3-Clause
#include <support/toy_model.h>

#include <limits>

#include <ATen/CPUGeneratorImpl.h>

namespace apex::testing {

ToyModel ToyModel::mlp(const std::vector<int64_t>& widths, uint64_t seed, at::ScalarType dtype) {
  ToyModel model;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  auto add = [&](const std::string& name, at::IntArrayRef shape) {
    at::Tensor value = at::randn(shape, generator, at::kDouble) * 0.5;
    if (at::isComplexType(dtype)) {
      // Small values, since the complex tanh has poles.
      value = at::complex(value, at::randn(shape, generator, at::kDouble)) * 0.1;
    }
    model.parameters.push_back({name, value.to(dtype).requires_grad_()});
  };
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    add("fc" + std::to_string(i) + ".weight", {widths[i + 1], widths[i]});
    add("fc" + std::to_string(i) + ".bias", {widths[i + 1]});
  }
  return model;
}

at::Tensor ToyModel::forward(const at::Tensor& x) const {
  at::Tensor h = x.to(parameters.front().tensor.scalar_type());
  for (size_t i = 0; i < parameters.size(); i += 2) {
    h = at::addmm(parameters[i + 1].tensor, h, parameters[i].tensor.t());
    if (i + 2 < parameters.size()) h = at::tanh(h);
  }
  return h;
}

ToyModel ToyModel::clone(const at::TensorOptions& options) const {
  ToyModel copy;
  for (const auto& [name, tensor] : parameters) {
    const at::Tensor value = tensor.detach().to(options, /*non_blocking=*/false, /*copy=*/true);
    copy.parameters.push_back({name, value.requires_grad_(tensor.requires_grad())});
  }
  return copy;
}

void ToyModel::zero_grad() {
  for (auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
}

void ToyModel::sgd_step(double learning_rate) {
  at::NoGradGuard no_grad;
  for (auto& parameter : parameters) {
    if (parameter.tensor.grad().defined()) {
      parameter.tensor.sub_(parameter.tensor.grad(), learning_rate);
    }
  }
}

at::Tensor random_batch(int64_t rows, int64_t columns, uint64_t seed) {
  return at::randn({rows, columns}, at::detail::createCPUGenerator(seed), at::kDouble);
}

at::Tensor rows_of_rank(const at::Tensor& batch, int rank, int world) {
  const int64_t rows = batch.size(0) / world;
  return batch.narrow(0, rank * rows, rows);
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return std::numeric_limits<double>::infinity();
  if (!a.defined()) return 0;
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  if (a.numel() == 0) return 0;
  const auto wide = at::isComplexType(a.scalar_type()) ? at::kComplexDouble : at::kDouble;
  const at::Tensor x = a.detach().to(wide);
  const at::Tensor y = b.detach().to(wide);
  const double scale = y.abs().max().item<double>();
  const double error = (x - y).abs().max().item<double>();
  return scale > 0 ? error / scale : error;
}

}  // namespace apex::testing
