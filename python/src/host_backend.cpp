// SPDX-License-Identifier: BSD-3-Clause
#include "host_backend.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <apex/distributed.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace nb = nanobind;

namespace apex::python {

void init_host_backend(nb::module_& m) {
  m.def(
      "add_host_backend",
      [](const std::string& group, int64_t timeout_ms, const std::string& name,
         const std::vector<uint64_t>& global_ranks) {
        distributed::add_host_backend(c10d::resolve_process_group(group),
                                      std::chrono::milliseconds(timeout_ms), name, global_ranks);
      },
      nb::arg("group"), nb::arg("timeout_ms"), nb::arg("name"), nb::arg("global_ranks"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Gives the registered group the backend 'apex' for CPU tensors. Collective; blocks.");
  m.def(
      "host_backend_timeout",
      [](const std::string& group) {
        const auto backend = c10d::resolve_process_group(group)->getBackend(at::kCPU);
        return static_cast<int64_t>(backend->getBackendOptions()->timeout.count());
      },
      nb::arg("group"), "Timeout of the registered group's CPU collectives, in milliseconds.");
}

}  // namespace apex::python
