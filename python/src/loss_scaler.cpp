// SPDX-License-Identifier: BSD-3-Clause
#include "loss_scaler.h"

#include <string>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <apex/amp/loss_scaler.h>

#include "torch_caster.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace apex::python {

namespace {

using amp::LossScaler;
using amp::LossScalerOptions;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

void construct(LossScaler* self, double init_scale, bool dynamic, double growth_factor,
               double backoff_factor, int64_t growth_interval, std::optional<double> min_scale,
               std::optional<double> max_scale) {
  new (self) LossScaler(LossScalerOptions(init_scale)
                            .dynamic(dynamic)
                            .growth_factor(growth_factor)
                            .backoff_factor(backoff_factor)
                            .growth_interval(growth_interval)
                            .min_scale(min_scale)
                            .max_scale(max_scale));
}

}  // namespace

void init_loss_scaler(nb::module_& m) {
  nb::class_<LossScaler>(m, "LossScaler",
                         "Scales a loss, unscales gradients, notices inf and nan, adapts the "
                         "scale. State lives on the device of the loss; nothing blocks the host "
                         "except overflowed, get_scale and growth_tracker. Not thread safe.")
      .def("__init__", &construct, "init_scale"_a = 65536.0, "dynamic"_a = true,
           "growth_factor"_a = 2.0, "backoff_factor"_a = 0.5, "growth_interval"_a = 2000,
           "min_scale"_a = nb::none(), "max_scale"_a = nb::none(),
           "Raises ValueError for values out of range.")
      .def("scale", &LossScaler::scale, "loss"_a, NoGil(),
           "The loss as float32 times the scale; differentiable.")
      .def("scale_tensor", &LossScaler::scale_tensor,
           "The scale: float32, shape [1], the scaler's own memory.")
      .def("unscale_", nb::overload_cast<const std::vector<at::Tensor>&>(&LossScaler::unscale_),
           "grads"_a, NoGil(),
           "Multiply gradients by 1/scale in place and remember inf or nan in them.")
      .def("found_inf", &LossScaler::found_inf, NoGil(),
           "New float32 tensor of shape [1], above zero after inf or nan.")
      .def(
          "synchronize",
          [](LossScaler& self, const std::string& group_name) {
            self.synchronize(c10d::resolve_process_group(group_name));
          },
          "group_name"_a, NoGil(),
          "Combine the overflow flag over the ranks of the group of this name.")
      .def("overflowed", &LossScaler::overflowed, NoGil(),
           "Whether inf or nan was found; waits for the device.")
      .def("clear_found_inf", &LossScaler::clear_found_inf, NoGil(), "Forget what was found.")
      .def("update", &LossScaler::update, NoGil(), "Adapt the scale and forget what was found.")
      .def("get_scale", &LossScaler::get_scale, NoGil(), "The scale; waits for the device.")
      .def("set_scale", &LossScaler::set_scale, "scale"_a, NoGil(), "Set the scale.")
      .def("growth_tracker", &LossScaler::growth_tracker, NoGil(),
           "Clean updates in a row; waits for the device.")
      .def("set_growth_tracker", &LossScaler::set_growth_tracker, "count"_a, NoGil(),
           "Set the number of clean updates in a row.");
}

}  // namespace apex::python
