// SPDX-License-Identifier: BSD-3-Clause
#include "module_watch.h"

#include <utility>
#include <vector>

#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace apex::python {

namespace {

/// Detects changes of the `_parameters` and `_modules` dictionaries of a module tree. It compares
/// the values by identity, without running Python code. That takes a few nanoseconds per entry,
/// which is cheap enough for every forward.
class ModuleWatch {
 public:
  explicit ModuleWatch(const std::vector<nb::dict>& dictionaries) {
    for (const nb::dict& dictionary : dictionaries) {
      Entry entry{dictionary, {}};
      PyObject* value = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(dictionary.ptr(), &position, nullptr, &value)) {
        entry.values.push_back(nb::borrow(value));
      }
      entries_.push_back(std::move(entry));
    }
  }

  bool changed() const {
    for (const Entry& entry : entries_) {
      PyObject* value = nullptr;
      Py_ssize_t position = 0;
      size_t i = 0;
      while (PyDict_Next(entry.dictionary.ptr(), &position, nullptr, &value)) {
        if (i == entry.values.size() || entry.values[i].ptr() != value) return true;
        ++i;
      }
      if (i != entry.values.size()) return true;
    }
    return false;
  }

  /// For the garbage collector: a module may refer to its wrapper, which owns this, in a cycle.
  int traverse(visitproc visit, void* arg) const {
    for (const Entry& entry : entries_) {
      Py_VISIT(entry.dictionary.ptr());
      for (const nb::object& value : entry.values) Py_VISIT(value.ptr());
    }
    return 0;
  }

  void clear() { std::vector<Entry>().swap(entries_); }

 private:
  struct Entry {
    nb::dict dictionary;
    // Owned, so that no new object gets the address of a removed value.
    std::vector<nb::object> values;
  };
  std::vector<Entry> entries_;
};

int traverse_watch(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<ModuleWatch>(self)->traverse(visit, arg) : 0;
}

int clear_watch(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<ModuleWatch>(self)->clear();
  return 0;
}

PyType_Slot watch_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_watch)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_watch)},
    {0, nullptr},
};

}  // namespace

void init_module_watch(nb::module_& m) {
  nb::class_<ModuleWatch>(m, "ModuleWatch", nb::type_slots(watch_slots),
                          "Remembers the values of dictionaries by identity and order.")
      .def(nb::init<const std::vector<nb::dict>&>(), nb::arg("dictionaries"))
      .def("changed", &ModuleWatch::changed,
           "True if an entry was added, removed or replaced since construction.");
}

}  // namespace apex::python
