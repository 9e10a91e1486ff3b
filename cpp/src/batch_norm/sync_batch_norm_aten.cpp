// SPDX-License-Identifier: BSD-3-Clause
#include "batch_norm/sync_batch_norm_aten.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace apex::parallel::detail {
namespace {

using kernels::ReluMask;

/// A view of `tensor` as [R, C] or [N, C, S], without a copy.
template <typename Call>
at::Tensor flat(const at::Tensor& tensor, const Call& call) {
  const auto& [batch, channels, plane] = call.sizes.planes;
  if (!call.sizes.rows) return tensor.view({batch, channels, plane});
  const bool moved = call.layout == MemoryLayout::kMovedRows;
  return (moved ? tensor.movedim(1, -1) : tensor).view({batch * plane, channels});
}

/// `tensor` in the type that ATen computes in for `x`. Its operators require this type of
/// per-channel tensors.
at::Tensor computed(const at::Tensor& tensor, const at::Tensor& x) {
  return tensor.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).contiguous();
}

OptionalTensor computed(const OptionalTensor& tensor, const at::Tensor& x) {
  return present(tensor) ? OptionalTensor(computed(*tensor, x)) : std::nullopt;
}

/// The normalizing pass of forward and inference. `mean` and `invstd` are float64.
template <typename Arguments, typename Call>
void normalize(const Arguments& a, const Call& call, const at::Tensor& mean,
               const at::Tensor& invstd) {
  at::Tensor x = flat(call.x, call);
  if (x.numel() == 0) return;
  if (present(call.z)) x = computed(x, x);  // one rounding, not two
  at::Tensor y = at::batch_norm_elemt(x, computed(a.weight, x), computed(a.bias, x),
                                      computed(mean, x), computed(invstd, x), a.eps);
  if (present(call.z)) y.add_(flat(*call.z, call));
  if (a.fuse_relu) y.relu_();
  flat(call.output, call).copy_(y);
}

at::Tensor record_of(const at::Tensor& x, int64_t channels, int64_t count) {
  const at::Tensor record =
      at::zeros({kernels::statistics_length(channels)}, x.options().dtype(at::kDouble));
  if (count == 0) return record;
  // With eps = 0 the variance follows from invstd. ATen returns an invstd of 0 for a variance of 0.
  const auto [mean, invstd] = at::batch_norm_stats(x, 0.0);
  const at::Tensor variance = invstd.to(at::kDouble).square().reciprocal();
  record.narrow(0, 0, channels).copy_(mean);
  record.narrow(0, channels, channels).copy_(variance.masked_fill(invstd == 0, 0).mul(count));
  record.narrow(0, 2 * channels, 1).fill_(count);
  return record;
}

ForwardResult forward_aten(const ForwardArguments& a, const ForwardCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const int64_t channels = call.sizes.planes.channels;
  if (call.counter.defined()) call.counter.add_(1);
  const at::Tensor record =
      record_of(flat(call.x, call), channels, call.sizes.values_per_channel());
  const at::Tensor records = (call.peers ? gather_statistics(call.peers, record, channels) : record)
                                 .view({-1, kernels::statistics_length(channels)});
  const at::Tensor counts = records.select(1, 2 * channels);
  // For a rank without values, ATen's merge would divide zero by zero.
  const at::Tensor weights = counts.clamp_min(std::numeric_limits<float>::min());
  const at::Tensor variances = records.narrow(1, channels, channels) / weights.unsqueeze(1);
  const auto [mean, invstd] = at::batch_norm_gather_stats_with_counts(
      records, records.narrow(1, 0, channels).contiguous(), (variances + a.eps).rsqrt(), {}, {},
      /*momentum=*/0, a.eps, weights);
  const at::Tensor total = counts.sum();
  call.mean.copy_(mean);
  call.invstd.copy_(invstd);
  call.count.copy_(total.view({1}));

  at::Tensor factor = at::full({}, a.momentum.value_or(0.0), mean.options());
  if (!a.momentum && call.counter.defined()) factor = call.counter.to(at::kDouble).reciprocal();
  factor = factor.masked_fill(total <= 1, 0);
  const auto update = [&](const OptionalTensor& running, const at::Tensor& value) {
    if (present(running)) running->copy_(running->to(at::kDouble) * (1 - factor) + value * factor);
  };
  update(a.running_mean, mean);
  update(a.running_var,
         (invstd.square().reciprocal() - a.eps) * (total / (total - 1).clamp_min(1)));
  normalize(a, call, mean, invstd);
  store_counter(a.num_batches_tracked, call.counter);
  return call.results;
}

at::Tensor inference_aten(const InferenceArguments& a, const InferenceCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  normalize(a, call, a.running_mean, (a.running_var.to(at::kDouble) + a.eps).rsqrt());
  return call.output;
}

BackwardResult backward_aten(const BackwardArguments& a, const BackwardCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const int64_t channels = call.sizes.planes.channels;
  const at::Tensor x = flat(call.x, call);
  const bool empty = x.numel() == 0;
  const at::Tensor of_std = a.invstd_or_var.to(at::kDouble);
  const at::Tensor invstd64 = call.training ? of_std : (of_std + a.eps).rsqrt();
  const at::Tensor mean = computed(a.mean, x), invstd = computed(invstd64, x);
  const OptionalTensor weight = computed(a.weight, x);
  at::Tensor dy = flat(call.dy, call);
  if (call.mask != ReluMask::kNone && !empty) {
    const at::Tensor y =
        call.mask == ReluMask::kOutput
            ? flat(*call.y, call)
            : at::batch_norm_elemt(x, weight, computed(a.bias, x), mean, invstd, a.eps);
    dy = dy.masked_fill(y <= 0, 0);
  }
  at::Tensor sums = at::zeros({2 * channels}, a.mean.options().dtype(at::kDouble));
  const at::Tensor sum_dy = sums.narrow(0, 0, channels),
                   sum_dy_xmu = sums.narrow(0, channels, channels);
  if (call.reduces) {
    if (!empty) {
      const auto [sum, dot, of_weight, of_bias] =
          at::batch_norm_backward_reduce(dy, x, mean, invstd, weight, true, false, false);
      sum_dy.copy_(sum);
      sum_dy_xmu.copy_(dot);
    }
    const at::Tensor &dweight = std::get<2>(call.results), &dbias = std::get<3>(call.results);
    if (dweight.numel() > 0) dweight.copy_(sum_dy_xmu * invstd64);
    if (dbias.numel() > 0) dbias.copy_(sum_dy);
  }
  if (call.peers) all_reduce(call.peers, sums, Direction::kBackward, channels);
  if (call.dx.numel() > 0) {
    // ATen takes the number of values as an int32, which may overflow, so divide here.
    const at::Tensor one = at::ones({1}, x.options().dtype(at::kInt));
    if (call.training) {
      sums.div_(a.count->clamp_min(1));
    } else {
      sums.zero_();
    }
    flat(call.dx, call)
        .copy_(at::batch_norm_backward_elemt(dy, x, mean, invstd, weight, computed(sum_dy, x),
                                             computed(sum_dy_xmu, x), one));
  }
  if (call.dz.numel() > 0) flat(call.dz, call).copy_(dy);
  return call.results;
}

/// The results of one forward and backward on one rank: tensors by name.
using Results = std::vector<std::pair<const char*, at::Tensor>>;

struct Trial {
  at::Tensor x, z, dy, weight, bias, output;
  ReluMask mask;
  bool rows;
};

/// The values are chosen so that none is near the threshold of the ReLU, and no sum cancels.
Trial make_trial(c10::Device device, at::ScalarType dtype, at::IntArrayRef shape, bool rows,
                 ReluMask mask) {
  const auto parameters = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor i = at::arange(c10::multiply_integers(shape), at::kDouble).view(shape);
  const at::Tensor c = at::arange(shape[1], at::kDouble);
  const at::Tensor wave = (i * 0.7).sin(), x = wave + wave.sign() * 0.5;
  const bool add = mask == ReluMask::kOutput;
  return {(x + 3).to(device, dtype),
          add ? ((i * 1.3).cos() * 0.2).to(device, dtype) : at::Tensor(),
          (x * 0.5 + 1 + (i * 1.1).cos() * 0.5).to(device, dtype),
          (c * 0.1 + 1).to(device, parameters),
          ((c * 0.1).sin() * 0.1).to(device, parameters),
          at::Tensor(),
          mask,
          rows};
}

Results run(const Implementation& implementation, Trial& trial) {
  const at::Tensor mean = at::zeros_like(trial.weight), var = at::ones_like(trial.weight),
                   batches = at::full({}, 4, trial.x.options().dtype(at::kLong));
  const OptionalTensor z = trial.z.defined() ? OptionalTensor(trial.z) : std::nullopt;
  const OptionalTensor weight = trial.weight, bias = trial.bias, running_mean = mean,
                       running_var = var, num_batches = batches;
  const bool relu = trial.mask != ReluMask::kNone;
  const ForwardArguments forward{trial.x,     z,   weight, bias,       running_mean, running_var,
                                 num_batches, 0.1, 1e-5,   trial.rows, relu,         ""};
  const auto [y, m, s, n] = implementation.forward(forward, ForwardCall(forward));
  // Both implementations read the ReLU mask from the same output.
  if (!trial.output.defined()) trial.output = y;
  const OptionalTensor count = n;
  const OptionalTensor output = z ? OptionalTensor(trial.output) : std::nullopt;
  const BackwardArguments backward{trial.dy, trial.x,    output, weight,
                                   bias,     m,          s,      count,
                                   1e-5,     trial.rows, relu,   {true, true, true, true},
                                   ""};
  const auto [dx, dz, dw, db] = implementation.backward(backward, BackwardCall(backward));
  return {{"output", y},
          {"mean", m},
          {"1 / standard deviation", s},
          {"count", n},
          {"running mean", mean},
          {"running variance", var},
          {"number of batches", batches},
          {"gradient of the input", dx},
          {"gradient of z", dz},
          {"gradient of the weight", dw},
          {"gradient of the bias", db}};
}

double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble  ? 1e-9
         : dtype == at::kFloat ? 1e-4
         : dtype == at::kHalf  ? 4e-3
                               : 3e-2;
}

/// Returns a description of the first error of the kernels, or an empty string. Runs every kernel
/// of the dtype, with several blocks per channel.
std::string compare(const Implementation& kernels, c10::Device device, at::ScalarType dtype) {
  for (const bool rows : {false, true}) {
    for (const int64_t less : {0, 4, 2, 1}) {  // loads of 16 bytes, 8 bytes, one element
      for (const ReluMask mask : {ReluMask::kNone, ReluMask::kRecompute, ReluMask::kOutput}) {
        const auto shape =
            rows ? std::vector<int64_t>{2048, 16 - less} : std::vector<int64_t>{32, 2, 512 - less};
        Trial trial = make_trial(device, dtype, shape, rows, mask);
        const Results want = run(kAten, trial);
        Results got;
        try {
          got = run(kernels, trial);
        } catch (const c10::OutOfMemoryError&) {
          throw;
        } catch (const c10::Error& error) {
          return std::string("fail: ") + error.what_without_backtrace();
        }
        for (size_t i = 0; i < want.size(); ++i) {
          const auto on_host = [](const at::Tensor& of) { return of.to(at::kCPU, at::kDouble); };
          const at::Tensor expected = on_host(want[i].second);
          if (expected.numel() == 0) continue;
          const at::Tensor error = (on_host(got[i].second) - expected).abs().max();
          const auto off = (error / expected.abs().max()).item<double>();
          if (!(off <= tolerance(dtype))) {
            return "give a wrong " + std::string(want[i].first) + " (relative error " +
                   std::to_string(off) + ")";
          }
        }
      }
    }
  }
  return "";
}

struct Choices {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, at::ScalarType>, bool> aten;
};

Choices& choices() {
  static auto* const instance = new Choices;
  return *instance;
}

}  // namespace

const Implementation kAten{&forward_aten, &inference_aten, &backward_aten};

const Implementation& choose(const Implementation& kernels, const at::Tensor& x, bool capturing) {
  const auto key = std::pair(x.get_device(), x.scalar_type());
  const auto chosen = [&](bool aten) -> const Implementation& { return aten ? kAten : kernels; };
  {
    const std::lock_guard<std::mutex> lock(choices().mutex);
    const auto known = choices().aten.find(key);
    if (known != choices().aten.end()) return chosen(known->second);
  }
  const char* const variable = std::getenv("APEX_SYNC_BATCH_NORM");
  const std::string name = variable == nullptr ? "" : variable;
  TORCH_CHECK_VALUE(variable == nullptr || name == "apex" || name == "aten",
                    "APEX_SYNC_BATCH_NORM is '", name,
                    "'; it must be apex (this library's CUDA kernels) or aten (torch's "
                    "operators).");
  if (variable == nullptr && capturing) return kernels;  // a capture must not block the host
  std::string fault;
  if (variable == nullptr) fault = compare(kernels, x.device(), x.scalar_type());
  const bool aten = name == "aten" || !fault.empty();
  {
    const std::lock_guard<std::mutex> lock(choices().mutex);
    const auto [known, is_new] = choices().aten.emplace(key, aten);
    if (!is_new) return chosen(known->second);  // another thread was first
  }
  if (!fault.empty()) {
    TORCH_WARN("apex sync batch norm: on ", x.device(), " the CUDA kernels for ", x.scalar_type(),
               " ", fault,
               ". Batch norm of this dtype uses torch's operators from now on, which are slower. "
               "Please report this message with the output of `python -m apex` and the GPU's name. "
               "APEX_SYNC_BATCH_NORM=aten chooses torch's operators without a warning.");
  }
  return chosen(aten);
}

void forget_choices() {
  const std::lock_guard<std::mutex> lock(choices().mutex);
  choices().aten.clear();
}

}  // namespace apex::parallel::detail
