// SPDX-License-Identifier: BSD-3-Clause
#include "errors.h"

#include <string>
#include <thread>

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <apex/error.h>

namespace nb = nanobind;

namespace apex::python {

namespace {

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (python_error& error) {
    error.restore();
  } catch (const InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (const c10::NotImplementedError& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what_without_backtrace());
  } catch (const c10::IndexError& error) {
    PyErr_SetString(PyExc_IndexError, error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

/// Throws Python's current exception as torch's python_error, which passes through autograd
/// unchanged. Needs the GIL.
[[noreturn]] void throw_current() {
  python_error error;
  error.persist();
  throw error;
}

/// Runs Python's signal handlers while C++ waits. If a handler raises, the exception ends the wait.
bool sees_signal(std::thread::id main_thread) {
  if (std::this_thread::get_id() != main_thread || Py_IsInitialized() == 0) return false;
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  throw_current();
}

}  // namespace

void rethrow(nb::python_error& raised, const std::string& what) {
  if (raised.matches(PyExc_Exception)) throw Error(what + raised.what());
  raised.restore();
  throw_current();
}

void init_errors(nb::module_&) {
  nb::register_exception_translator(translate);
  set_interruption_check(
      [main_thread = std::this_thread::get_id()] { return sees_signal(main_thread); });
}

}  // namespace apex::python
