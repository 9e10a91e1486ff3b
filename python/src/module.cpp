// SPDX-License-Identifier: BSD-3-Clause
#include <nanobind/nanobind.h>

#include <apex/version.h>

#include "errors.h"
#include "host_backend.h"
#include "module_watch.h"
#include "python_comm_hook.h"
#include "reducer.h"
#include "stack_reader.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "C++ engine of apex: gradient reducer, synchronized batch norm, process groups.";
  m.attr("__version__") = APEX_VERSION;
  // A hook may refer to the wrapper that owns it. Such cycles live until the process ends.
  nb::set_leak_warnings(false);
  apex::python::init_errors(m);
  apex::python::init_host_backend(m);
  apex::python::init_module_watch(m);
  apex::python::init_python_comm_hook(m);
  apex::python::init_reducer(m);
  apex::python::init_stack_reader(m);
}
