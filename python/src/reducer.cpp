// SPDX-License-Identifier: BSD-3-Clause
#include "reducer.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <apex/distributed.h>
#include <apex/error.h>
#include <apex/parallel/detail/model_sync.h>
#include <apex/parallel/detail/sharding.h>
#include <apex/parallel/reducer.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "python_comm_hook.h"
#include "torch_caster.h"

namespace nb = nanobind;

namespace apex::python {

namespace {

using parallel::BucketLimits;
using parallel::NamedTensor;
using parallel::Reducer;
using parallel::ReducerOptions;
using parallel::ReducerStatistics;

std::vector<NamedTensor> named(const std::vector<std::string>& names,
                               const std::vector<at::Tensor>& tensors) {
  if (names.size() != tensors.size()) {
    throw InvalidArgument(std::to_string(names.size()) + " names for " +
                          std::to_string(tensors.size()) + " tensors");
  }
  std::vector<NamedTensor> result;
  for (size_t i = 0; i < names.size(); ++i) result.push_back({names[i], tensors[i]});
  return result;
}

/// Looks up process groups by name. Both languages share c10d's registry, and the Python package
/// has registered the groups that were missing.
std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups(const std::vector<std::string>& names) {
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> result;
  for (const std::string& name : names) result.push_back(c10d::resolve_process_group(name));
  return result;
}

nb::dict to_dict(const ReducerStatistics& statistics) {
  nb::dict result;
  result["backwards"] = statistics.backwards;
  result["plans_recorded"] = statistics.plans_recorded;
  result["launched_in_backward"] = statistics.launched_in_backward;
  result["launched_at_end"] = statistics.launched_at_end;
  result["gradients_copied"] = statistics.gradients_copied;
  result["reduced_in_shared_memory"] = statistics.reduced_in_shared_memory;
  result["reduced_by_host"] = statistics.reduced_by_host;
  result["steps_skipped"] = statistics.steps_skipped;
  result["usage_reads"] = statistics.usage_reads;
  result["last_backward_wait_s"] = statistics.last_backward_wait_s;
  result["last_step_compute_s"] = statistics.last_step_compute_s;
  return result;
}

std::shared_ptr<parallel::CommHook> builtin_comm_hook(
    const std::string& name, c10::intrusive_ptr<c10d::ProcessGroup> group) {
  if (name == "fp16") return parallel::make_compress_hook(std::move(group), at::kHalf);
  if (name == "bf16") return parallel::make_compress_hook(std::move(group), at::kBFloat16);
  throw InvalidArgument("unknown built-in communication hook '" + name + "': choose fp16 or bf16");
}

}  // namespace

void init_reducer(nb::module_& m) {
  using release = nb::call_guard<nb::gil_scoped_release>;

  nb::class_<ReducerOptions>(m, "ReducerOptions", "How gradients are reduced; see the C++ class.")
      .def(nb::init<>())
      .def_prop_rw(
          "cap", [](const ReducerOptions& self) { return self.limits.cap; },
          [](ReducerOptions& self, int64_t cap) { self.limits.cap = cap; })
      .def_prop_rw(
          "first_cap", [](const ReducerOptions& self) { return self.limits.first_cap; },
          [](ReducerOptions& self, int64_t cap) { self.limits.first_cap = cap; })
      .def_prop_rw(
          "cap_in_bytes",
          [](const ReducerOptions& self) { return self.limits.unit == BucketLimits::Unit::kBytes; },
          [](ReducerOptions& self, bool on) {
            self.limits.unit = on ? BucketLimits::Unit::kBytes : BucketLimits::Unit::kElements;
          })
      .def_rw("delay_allreduce", &ReducerOptions::delay_allreduce)
      .def_rw("trigger_parameters", &ReducerOptions::trigger_parameters)
      .def_rw("gradient_as_bucket_view", &ReducerOptions::gradient_as_bucket_view)
      .def_rw("allreduce_always_fp32", &ReducerOptions::allreduce_always_fp32)
      .def_rw("gradient_average", &ReducerOptions::gradient_average)
      .def_rw("weighted", &ReducerOptions::weighted)
      .def_rw("gradient_predivide_factor", &ReducerOptions::gradient_predivide_factor)
      .def_rw("static_graph", &ReducerOptions::static_graph)
      .def_rw("init_sync", &ReducerOptions::init_sync)
      .def_rw("begins_alike", &ReducerOptions::begins_alike, nb::arg().none())
      .def_rw("check_finite", &ReducerOptions::check_finite)
      .def_rw("check_steps", &ReducerOptions::check_steps, nb::arg().none())
      .def_rw("steps_reported", &ReducerOptions::steps_reported)
      .def_rw("skip_failed_steps", &ReducerOptions::skip_failed_steps)
      .def_rw("replica_check_every", &ReducerOptions::replica_check_every, nb::arg().none())
      .def_prop_rw(
          "on_divergence",
          [](const ReducerOptions& self) {
            return self.on_divergence == parallel::OnDivergence::kRaise ? "raise" : "warn";
          },
          [](ReducerOptions& self, const std::string& name) {
            self.on_divergence =
                name == "raise" ? parallel::OnDivergence::kRaise : parallel::OnDivergence::kWarn;
          })
      .def_rw("settings", &ReducerOptions::settings);

  nb::class_<Reducer>(m, "Reducer", "The gradient reducer; see apex/parallel/reducer.h.")
      .def(
          "__init__",
          [](Reducer* self, const std::vector<std::string>& names,
             const std::vector<at::Tensor>& parameters, const std::vector<std::string>& group_names,
             const ReducerOptions& options) {
            new (self) Reducer(named(names, parameters), groups(group_names), options);
          },
          nb::arg("names"), nb::arg("parameters"), nb::arg("groups"), nb::arg("options"), release())
      .def("prepare_for_forward", &Reducer::prepare_for_forward, release())
      .def("skip_step", &Reducer::skip_step, release())
      .def_prop_ro("step_skipped", &Reducer::step_skipped, release())
      .def("begin_weight", nb::overload_cast<const at::Tensor&>(&Reducer::begin_weight),
           nb::arg("weight"), release())
      .def("begin_weight_number", nb::overload_cast<double>(&Reducer::begin_weight),
           nb::arg("weight"), release())
      .def("end_weight", &Reducer::end_weight, release())
      .def("take_weight", &Reducer::take_weight, nb::arg("other"), release())
      .def_prop_ro("total_weight", &Reducer::total_weight, release())
      .def("check_replicas_next", &Reducer::check_replicas_next, release())
      .def_static("optimizer_steps", &Reducer::optimizer_steps, nb::arg("parameters"), release())
      .def_static("release_all", &Reducer::release_all, release())
      .def_static("optimizer_stepped", &Reducer::optimizer_stepped, nb::arg("parameters"),
                  "Reports an optimizer step to the reducers of these parameters.", release())
      .def("watch_outputs", &Reducer::watch_outputs, nb::arg("outputs"), release())
      .def_prop_rw("synchronizing", &Reducer::synchronizing, &Reducer::set_synchronizing)
      .def(
          "set_comm_hook",
          [](Reducer& self, nb::object runner) {
            auto hook = make_python_comm_hook(std::move(runner));
            const nb::gil_scoped_release no_gil;
            self.set_comm_hook(std::move(hook));
          },
          nb::arg("runner"))
      .def(
          "set_builtin_comm_hook",
          [](Reducer& self, const std::string& name) {
            self.set_comm_hook(builtin_comm_hook(name, self.communicator()));
          },
          nb::arg("name"), release())
      .def("begin_join", &Reducer::begin_join, nb::arg("divide_by_initial_world_size"),
           nb::arg("throw_on_early_termination"), release())
      .def("end_join", &Reducer::end_join, nb::arg("tensors"), release())
      .def("leave_join", &Reducer::leave_join, release())
      .def("rebuild_buckets", &Reducer::rebuild_buckets, release())
      .def(
          "plan",
          [](const Reducer& self) -> std::optional<std::vector<std::vector<int64_t>>> {
            std::optional<parallel::BucketPlan> plan;
            {
              const nb::gil_scoped_release no_gil;
              plan = self.plan();
            }
            if (!plan) return std::nullopt;
            return plan->buckets;
          },
          "Parameter indices by bucket in launch order, or None before the first backward.")
      .def("buffers", &Reducer::buffers, release())
      .def("statistics", [](const Reducer& self) {
        ReducerStatistics statistics;
        {
          const nb::gil_scoped_release no_gil;
          statistics = self.statistics();
        }
        return to_dict(statistics);
      });

  m.def(
      "broadcast_coalesced",
      [](const std::vector<at::Tensor>& tensors, const std::string& group, int64_t root,
         const std::string& what) {
        parallel::broadcast_coalesced(tensors, c10d::resolve_process_group(group), root,
                                      parallel::kBroadcastBytes, what);
      },
      nb::arg("tensors"), nb::arg("group"), nb::arg("root"), nb::arg("what"), release());
  m.def("assign_owners", &parallel::assign_owners, nb::arg("costs"), nb::arg("ranks"));
  m.def(
      "broadcast_from_owners",
      [](const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& owners,
         const std::string& group, const std::string& what) {
        parallel::broadcast_from_owners(tensors, owners, c10d::resolve_process_group(group), what);
      },
      nb::arg("tensors"), nb::arg("owners"), nb::arg("group"), nb::arg("what"), release());
  m.def(
      "fail_group",
      [](const std::string& group, const std::string& why) {
        parallel::fail_group(*c10d::resolve_process_group(group), why);
      },
      nb::arg("group"), nb::arg("why"), release());
  m.def(
      "all_reduce_coalesced",
      [](const std::vector<at::Tensor>& tensors, const std::string& group, double scale,
         const std::string& what) {
        parallel::all_reduce_coalesced(tensors, c10d::resolve_process_group(group), scale, what);
      },
      nb::arg("tensors"), nb::arg("group"), nb::arg("scale"), nb::arg("what"), release());
  m.def(
      "all_reduce",
      [](const at::Tensor& tensor, const std::string& group) {
        distributed::all_reduce(tensor, c10d::ReduceOp::SUM, c10d::resolve_process_group(group));
      },
      nb::arg("tensor"), nb::arg("group"), release());
  m.def(
      "verify_same_model",
      [](const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
         const std::vector<std::string>& settings, const std::string& group) {
        parallel::verify_same_model(named(names, tensors), settings,
                                    c10d::resolve_process_group(group));
      },
      nb::arg("names"), nb::arg("tensors"), nb::arg("settings"), nb::arg("group"), release());
  m.def(
      "require_sendable",
      [](const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
         const std::string& what, const std::string& group) {
        parallel::require_sendable(named(names, tensors), what, c10d::resolve_process_group(group));
      },
      nb::arg("names"), nb::arg("tensors"), nb::arg("what"), nb::arg("group"), release());
}

}  // namespace apex::python
