// The second derivative of synchronized batch norm.
//
// Per channel, with M values over all ranks, xhat = (x - mean) * r, g = weight * dy (behind the
// ReLU's mask) and P(v) = v - mean(v) - xhat * mean(v * xhat), the backward is
//     dx = r P(g),   dweight = sum of dy * xhat here,   dbias = sum of dy here.
// P is symmetric, so that with G, u, v for the incoming gradients of dx, dweight and dbias
//     L = sum(g * r P(G)) + u * sum(dy * xhat) + v * sum(dy).
// dy and weight follow directly. x enters through xhat and r: for dL/dxhat = h and dL/dr = S (xhat
// held) it is r P(h) - r^2 xhat S / M, which is the backward of batch norm itself, where
//     h = u dy - r (g mean(G xhat) + G mean(g xhat))
//     S = sum(g G) - M (mean(g) mean(G) + mean(g xhat) mean(G xhat)).
// All sums go into one all-reduce.

#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "batch_norm/sync_batch_norm_ops.h"

namespace apex::parallel::detail {
namespace {

/// Moves between per-channel vectors and the shape of the input.
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

}  // namespace

DoubleBackwardResult double_backward(const BackwardCall& call, const at::Tensor& gg_input,
                                     const at::Tensor& gg_z, const at::Tensor& gg_weight,
                                     const at::Tensor& gg_bias) {
  const auto acc = call.input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Channels channels(call.input, call.channel_last);
  const bool training = call.count.has_value() && call.count->defined();
  const bool has_weight = call.weight.has_value() && call.weight->defined();
  const at::Tensor x = call.input.to(acc);

  at::Tensor count, mean = call.mean.to(acc), r;
  if (!training) {
    r = (call.invstd_or_var.to(at::kDouble) + call.eps).rsqrt().to(acc);
  } else {
    r = call.invstd_or_var.to(acc);
    count = call.count->to(acc);
    if (c10::GradMode::is_enabled()) {  // to be differentiated again: then as functions of x
      mean = call_all_reduce_sum(channels.sum(x), call.group_name) / count;
      const at::Tensor squares = channels.sum((x - channels.spread(mean)).square());
      r = (call_all_reduce_sum(squares, call.group_name) / count + call.eps).rsqrt();
    }
  }
  const at::Tensor weight = has_weight ? call.weight->to(acc) : at::ones_like(r.detach());
  const at::Tensor w = channels.spread(weight);
  const at::Tensor scale = channels.spread(r);
  const at::Tensor xhat = (x - channels.spread(mean)) * scale;

  at::Tensor mask, dy = call.grad_output.to(acc);
  if (call.fuse_relu) {
    if (call.output.has_value() && call.output->defined()) {
      mask = call.output->gt(0).to(acc);
    } else {
      at::Tensor before = xhat * w;
      if (call.bias.has_value() && call.bias->defined()) {
        before = before + channels.spread(call.bias->to(acc));
      }
      mask = before.gt(0).to(acc);
    }
    dy = dy * mask;
  }
  const at::Tensor g = dy * w;
  const at::Tensor u = gg_weight.defined() ? channels.spread(gg_weight.to(acc)) : at::Tensor();

  at::Tensor grad_dy = at::zeros_like(x);
  DoubleBackwardResult result;
  at::Tensor grad_x;
  if (u.defined()) {
    grad_dy = grad_dy + u * xhat;
  }
  if (call.needs_input && training) {
    const at::Tensor big_g = gg_input.defined() ? gg_input.to(acc) : at::zeros_like(x);
    const at::Tensor e = u.defined() ? dy * u : at::zeros_like(x);
    const at::Tensor sums =
        call_all_reduce_sum(at::stack({channels.sum(g), channels.sum(g * xhat), channels.sum(big_g),
                                       channels.sum(big_g * xhat), channels.sum(g * big_g),
                                       channels.sum(e), channels.sum(e * xhat)}),
                            call.group_name);
    const at::Tensor means = sums / count;
    const auto m = [&](int64_t i) { return channels.spread(means.select(0, i)); };
    const at::Tensor projected = big_g - m(2) - xhat * m(3);
    grad_dy = grad_dy + w * scale * projected;
    result.weight = channels.sum(dy * scale * projected);
    const at::Tensor h = e - scale * (g * m(3) + big_g * m(1));
    const at::Tensor mean_h = m(5) - scale * (m(0) * m(3) + m(2) * m(1));
    const at::Tensor mean_hx = m(6) - scale * m(1) * m(3) * 2;
    const at::Tensor s = m(4) - m(0) * m(2) - m(1) * m(3);  // S / M
    grad_x = scale * (h - mean_h - xhat * mean_hx) - scale.square() * xhat * s;
  } else {
    // The statistics are constants, or x needs no gradient at all.
    if (gg_input.defined() && call.needs_input) {
      const at::Tensor scaled = gg_input.to(acc) * scale;
      grad_dy = grad_dy + w * scaled;
      result.weight = channels.sum(dy * scaled);
    }
    if (u.defined()) {
      grad_x = u * dy * scale;
    }
  }
  if (gg_bias.defined()) {
    grad_dy = grad_dy + channels.spread(gg_bias.to(acc));
  }
  if (gg_z.defined()) {
    grad_dy = grad_dy + gg_z.to(acc);
  }
  if (mask.defined()) {
    grad_dy = grad_dy * mask;
  }
  result.grad_output = grad_dy.to(call.grad_output.scalar_type());
  if (grad_x.defined()) {
    result.input = grad_x.to(call.input.scalar_type());
  }
  if (!has_weight) {
    result.weight = at::Tensor();
  } else if (result.weight.defined()) {
    result.weight = result.weight.to(call.weight->scalar_type());
  }
  return result;
}

}  // namespace apex::parallel::detail
