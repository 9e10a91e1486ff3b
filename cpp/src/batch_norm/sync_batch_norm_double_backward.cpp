// SPDX-License-Identifier: BSD-3-Clause
// The second derivative of synchronized batch norm.
//
// Per channel, with M values over all ranks, xhat = (x - mean) * r, g = weight * dy (after the
// ReLU's mask) and P(v) = v - mean(v) - xhat * mean(v * xhat), the backward is
//     dx = r P(g),   dweight = sum of dy * xhat,   dbias = sum of dy,
// where dweight and dbias sum over this rank only. P is symmetric. With G, u, v for the incoming
// gradients of dx, dweight and dbias, the loss is
//     L = sum(g * r P(G)) + u * sum(dy * xhat) + v * sum(dy).
// The derivatives by dy and weight follow directly. x enters through xhat and r. With dL/dxhat = h
// and dL/dr = S (for constant xhat), the derivative by x is r P(h) - r^2 xhat S / M. That is the
// backward of batch norm itself, where
//     h = u dy - r (g mean(G xhat) + G mean(g xhat))
//     S = sum(g G) - M (mean(g) mean(G) + mean(g xhat) mean(G xhat)).
// One all-reduce carries all sums.

#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "batch_norm/sync_batch_norm_ops.h"

namespace apex::parallel::detail {
namespace {

/// Converts between per-channel vectors and the shape of the input.
class Channels {
 public:
  Channels(const at::Tensor& input, bool channel_last)
      : dim_(channel_dim(input, channel_last)), shape_(input.dim(), 1) {
    shape_[dim_] = -1;
    for (int64_t d = 0; d < input.dim(); ++d) {
      if (d != dim_) {
        others_.push_back(d);
      }
    }
  }
  at::Tensor sum(const at::Tensor& elements) const { return elements.sum(others_); }
  at::Tensor spread(const at::Tensor& per_channel) const { return per_channel.view(shape_); }

 private:
  int64_t dim_;
  std::vector<int64_t> shape_;
  std::vector<int64_t> others_;
};

/// The terms of the formulas above, in the compute type.
struct Terms {
  explicit Terms(const BackwardArguments& a);

  const at::ScalarType acc;
  const Channels channels;
  const bool training;
  const at::Tensor x;
  at::Tensor count, mean, r;
  at::Tensor w, scale, xhat;  ///< w and scale: weight and r, shaped to broadcast over the input
  at::Tensor mask;            ///< undefined without a ReLU
  at::Tensor dy, g;           ///< after the mask
};

Terms::Terms(const BackwardArguments& a)
    : acc(a.input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
      channels(a.input, a.channel_last),
      training(present(a.count)),
      x(a.input.to(acc)),
      mean(a.mean.to(acc)),
      dy(a.grad_output.to(acc)) {
  if (!training) {
    r = (a.invstd_or_var.to(at::kDouble) + a.eps).rsqrt().to(acc);
  } else {
    r = a.invstd_or_var.to(acc);
    count = a.count->to(acc);
    if (c10::GradMode::is_enabled()) {  // for a further derivative: as functions of x
      mean = call_all_reduce_sum(channels.sum(x), a.group_name, a.layer) / count;
      const at::Tensor squares = channels.sum((x - channels.spread(mean)).square());
      r = (call_all_reduce_sum(squares, a.group_name, a.layer) / count + a.eps).rsqrt();
    }
  }
  w = channels.spread(present(a.weight) ? a.weight->to(acc) : at::ones_like(r.detach()));
  scale = channels.spread(r);
  xhat = (x - channels.spread(mean)) * scale;
  if (a.fuse_relu) {
    if (present(a.output)) {
      mask = a.output->gt(0).to(acc);
    } else {
      at::Tensor before = xhat * w;
      if (present(a.bias)) before = before + channels.spread(a.bias->to(acc));
      mask = before.gt(0).to(acc);
    }
    dy = dy * mask;
  }
  g = dy * w;
}

/// Gradients of dy, x and weight; any may be undefined.
struct Gradients {
  at::Tensor dy, x, weight;
};

/// In training, where the statistics depend on x. `big_g` and `u` are G and u, shaped to broadcast
/// over the input.
Gradients through_statistics(const Terms& t, const at::Tensor& big_g, const at::Tensor& u,
                             const BackwardArguments& a) {
  const at::Tensor e = u.defined() ? t.dy * u : at::zeros_like(t.x);
  const auto sum = [&](const at::Tensor& elements) { return t.channels.sum(elements); };
  const at::Tensor sums =
      call_all_reduce_sum(at::stack({sum(t.g), sum(t.g * t.xhat), sum(big_g), sum(big_g * t.xhat),
                                     sum(t.g * big_g), sum(e), sum(e * t.xhat)}),
                          a.group_name, a.layer);
  const at::Tensor means = sums / t.count;
  const auto m = [&](int64_t i) { return t.channels.spread(means.select(0, i)); };
  const at::Tensor projected = big_g - m(2) - t.xhat * m(3);
  const at::Tensor h = e - t.scale * (t.g * m(3) + big_g * m(1));
  const at::Tensor mean_h = m(5) - t.scale * (m(0) * m(3) + m(2) * m(1));
  const at::Tensor mean_hx = m(6) - t.scale * m(1) * m(3) * 2;
  const at::Tensor s = m(4) - m(0) * m(2) - m(1) * m(3);  // S / M
  return {t.w * t.scale * projected,
          t.scale * (h - mean_h - t.xhat * mean_hx) - t.scale.square() * t.xhat * s,
          sum(t.dy * t.scale * projected)};
}

/// If the statistics are constants, or x needs no gradient.
Gradients past_statistics(const Terms& t, const at::Tensor& big_g, const at::Tensor& u) {
  Gradients result;
  if (big_g.defined()) {
    const at::Tensor scaled = big_g * t.scale;
    result.dy = t.w * scaled;
    result.weight = t.channels.sum(t.dy * scaled);
  }
  if (u.defined()) result.x = u * t.dy * t.scale;
  return result;
}

}  // namespace

DoubleBackwardResult double_backward(const BackwardArguments& a, const at::Tensor& gg_input,
                                     const at::Tensor& gg_z, const at::Tensor& gg_weight,
                                     const at::Tensor& gg_bias) {
  const Terms t(a);
  const bool needs_input = a.needs[0];
  const at::Tensor u = gg_weight.defined() ? t.channels.spread(gg_weight.to(t.acc)) : at::Tensor();
  at::Tensor big_g = gg_input.defined() && needs_input ? gg_input.to(t.acc) : at::Tensor();
  const bool through = needs_input && t.training;
  if (through && !big_g.defined()) big_g = at::zeros_like(t.x);
  const Gradients gradients =
      through ? through_statistics(t, big_g, u, a) : past_statistics(t, big_g, u);

  at::Tensor grad_dy = at::zeros_like(t.x);
  if (u.defined()) grad_dy = grad_dy + u * t.xhat;
  if (gradients.dy.defined()) grad_dy = grad_dy + gradients.dy;
  if (gg_bias.defined()) grad_dy = grad_dy + t.channels.spread(gg_bias.to(t.acc));
  if (gg_z.defined()) grad_dy = grad_dy + gg_z.to(t.acc);
  if (t.mask.defined()) grad_dy = grad_dy * t.mask;

  DoubleBackwardResult result;
  result.grad_output = grad_dy.to(a.grad_output.scalar_type());
  if (gradients.x.defined()) result.input = gradients.x.to(a.input.scalar_type());
  if (present(a.weight) && gradients.weight.defined()) {
    result.weight = gradients.weight.to(a.weight->scalar_type());
  }
  return result;
}

}  // namespace apex::parallel::detail
