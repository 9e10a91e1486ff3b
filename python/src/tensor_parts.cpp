// SPDX-License-Identifier: BSD-3-Clause
#include "tensor_parts.h"

#include <utility>
#include <vector>

#include <apex/error.h>
#include <apex/tensor_parts.h>
#include <nanobind/stl/vector.h>

#include <torch/csrc/Exceptions.h>

#include "torch_caster.h"

namespace nb = nanobind;

namespace apex::python {

namespace {

using Parts = std::vector<at::Tensor>;

/// Calls `function` from any thread. The function is never freed, because other threads may outlive
/// main().
Parts call(nb::handle function, const at::Tensor& tensor) {
  if (Py_IsInitialized() == 0) return {};
  const nb::gil_scoped_acquire gil;
  try {
    return nb::cast<Parts>(function(tensor));
  } catch (const nb::python_error& error) {
    // Only the message, without the traceback.
    throw Error(nb::str(error.value()).c_str());
  }
}

/// torch throws Python's errors as objects that refer to the error state of the thread.
void keep_error() {
  try {
    throw;
  } catch (python_error& error) {
    error.persist();
  } catch (...) {
    // Not a Python error.
  }
}

}  // namespace

void init_tensor_parts(nb::module_& m) {
  m.def(
      "set_tensor_parts",
      [](nb::object function) {
        set_tensor_parts(
            [held = function.release()](const at::Tensor& tensor) { return call(held, tensor); },
            keep_error);
      },
      nb::arg("function"), "Sets the function that finds the inner tensors of a subclass.");
  m.def(
      "tensor_parts",
      [](const Parts& tensors) {
        Parts found;
        for (const at::Tensor& tensor : tensors) {
          try {
            for (const at::Tensor& part : parts_of(tensor)) found.push_back(part);
          } catch (const Error&) {
            found.push_back(tensor);
          }
        }
        return found;
      },
      nb::arg("tensors"),
      "The tensors, with each subclass replaced by its inner tensors if they are known.");
}

}  // namespace apex::python
