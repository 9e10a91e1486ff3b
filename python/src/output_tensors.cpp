// SPDX-License-Identifier: BSD-3-Clause
#include "output_tensors.h"

#include <torch/csrc/autograd/python_variable.h>

namespace nb = nanobind;

namespace apex::python {

namespace {

/// Deeper nesting is assumed to be a cycle.
constexpr int kMaxDepth = 32;

void collect(PyObject* object, std::vector<at::Tensor>& tensors, int depth) {
  if (THPVariable_Check(object)) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.requires_grad()) tensors.push_back(tensor);
    return;
  }
  if (object == Py_None || depth == kMaxDepth || PyUnicode_Check(object) || PyLong_Check(object) ||
      PyFloat_Check(object) || PyType_Check(object)) {
    return;
  }
  if (PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
      collect(PyTuple_GET_ITEM(object, i), tensors, depth + 1);
    }
  } else if (PyList_Check(object)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
      collect(PyList_GET_ITEM(object, i), tensors, depth + 1);
    }
  } else if (PyDict_Check(object)) {
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, nullptr, &value)) collect(value, tensors, depth + 1);
  } else if (PyAnySet_Check(object)) {
    for (nb::handle item : nb::borrow(object)) collect(item.ptr(), tensors, depth + 1);
  } else if (PyObject* attributes = PyObject_GenericGetDict(object, nullptr)) {
    const nb::object owner = nb::steal(attributes);
    // The parameters of a module inside the output are not outputs.
    if (PyDict_GetItemString(attributes, "_parameters") == nullptr) {
      collect(attributes, tensors, depth + 1);
    }
  } else {
    PyErr_Clear();
    // Dataclasses with slots.
    if (nb::hasattr(object, "__dataclass_fields__")) {
      for (nb::handle name : nb::borrow(nb::getattr(object, "__dataclass_fields__"))) {
        const nb::object value = nb::getattr(object, name, nb::none());
        collect(value.ptr(), tensors, depth + 1);
      }
    }
  }
}

}  // namespace

std::vector<at::Tensor> output_tensors(nb::handle output) {
  std::vector<at::Tensor> tensors;
  collect(output.ptr(), tensors, 0);
  return tensors;
}

}  // namespace apex::python
