// SPDX-License-Identifier: BSD-3-Clause
#include "parameter_shards.h"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <apex/parallel/parameter_shards.h>

#include "torch_caster.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace apex::python {

namespace {

using parallel::ParameterPiece;
using parallel::ParameterShards;
using NoGil = nb::call_guard<nb::gil_scoped_release>;
using Pieces = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

std::vector<Pieces> to_tuples(const std::vector<std::vector<ParameterPiece>>& shards) {
  std::vector<Pieces> all;
  for (const auto& shard : shards) {
    Pieces& pieces = all.emplace_back();
    for (const ParameterPiece& piece : shard)
      pieces.emplace_back(piece.parameter, piece.begin, piece.end);
  }
  return all;
}

std::vector<parallel::NamedTensor> with_names(const std::vector<std::string>& names,
                                              const std::vector<at::Tensor>& parameters) {
  std::vector<parallel::NamedTensor> named;
  for (size_t i = 0; i < parameters.size(); ++i) named.push_back({names.at(i), parameters[i]});
  return named;
}

void construct_shards(ParameterShards* self, const std::vector<std::string>& names,
                      const std::vector<at::Tensor>& parameters, const std::string& group,
                      const std::vector<double>& costs, parallel::Cut cut,
                      const std::string& replicas) {
  new (self) ParameterShards(with_names(names, parameters), c10d::resolve_process_group(group),
                             costs, cut, c10d::resolve_process_group(replicas));
}

}  // namespace

void init_parameter_shards(nb::module_& m) {
  nb::enum_<parallel::Cut>(m, "Cut", "Which parameters are split between ranks.")
      .value("NEVER", parallel::Cut::kNever)
      .value("FEW", parallel::Cut::kFew)
      .value("EACH", parallel::Cut::kEach);
  m.def(
      "assign_shards",
      [](const std::vector<int64_t>& numels, const std::vector<double>& costs, int64_t ranks,
         parallel::Cut cut) {
        return to_tuples(parallel::assign_shards(numels, costs, ranks, cut));
      },
      "numels"_a, "costs"_a, "ranks"_a, "cut"_a,
      "The pieces (parameter, begin, end) that each rank steps.");
  nb::class_<ParameterShards>(m, "ParameterShards",
                              "The parameters that each rank steps, and their exchange. "
                              "Not thread safe.",
                              nb::is_weak_referenceable())
      .def("__init__", &construct_shards, "names"_a, "parameters"_a, "group"_a, "costs"_a, "cut"_a,
           "replicas"_a, NoGil())
      .def(
          "add",
          [](ParameterShards& self, const std::vector<std::string>& names,
             const std::vector<at::Tensor>& parameters,
             const std::vector<double>& costs) { self.add(with_names(names, parameters), costs); },
          "names"_a, "parameters"_a, "costs"_a, NoGil())
      .def("shards", [](const ParameterShards& self) { return to_tuples(self.shards()); })
      .def("tensors", &ParameterShards::tensors)
      .def("take_gradients", &ParameterShards::take_gradients, NoGil())
      .def("total_norm", &ParameterShards::total_norm, "gradients"_a, "norm_type"_a, NoGil())
      .def("drop_gradients", &ParameterShards::drop_gradients, NoGil())
      .def("publish", &ParameterShards::publish, NoGil())
      .def("give_up", &ParameterShards::give_up, "why"_a, NoGil());
}

}  // namespace apex::python
