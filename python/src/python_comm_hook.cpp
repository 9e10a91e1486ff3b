// SPDX-License-Identifier: BSD-3-Clause
#include "python_comm_hook.h"

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <apex/error.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "errors.h"
#include "torch_caster.h"

namespace nb = nanobind;

namespace apex::python {

namespace {

using parallel::GradientBucket;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// The bucket that a hook receives. It has the methods of torch.distributed.GradBucket.
struct BucketView {
  GradientBucket bucket;
};

/// Receives the result of a hook from the runner, on any thread.
struct Completion {
  FuturePtr future;
};

class PythonCommHook final : public parallel::CommHook {
 public:
  explicit PythonCommHook(nb::object runner) : runner_(std::move(runner)) {}

  ~PythonCommHook() override {
    const nb::gil_scoped_acquire gil;
    runner_.reset();
  }

  /// Not the name of the function: ranks compare hook names, and their functions may differ.
  std::string name() const override { return "Python function"; }

  FuturePtr run(GradientBucket& bucket) override {
    std::vector<c10::Device> devices;
    if (!bucket.buffer.device().is_cpu()) devices.push_back(bucket.buffer.device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
    const nb::gil_scoped_acquire gil;
    try {
      runner_(BucketView{bucket}, Completion{future});
    } catch (nb::python_error& error) {
      if (error.matches(PyExc_Exception))
        throw Error(std::string("a communication hook raised ") + error.what());
      try {
        rethrow(error, {});
      } catch (...) {
        throw parallel::HookInterrupted{std::current_exception()};
      }
    }
    return future;
  }

 private:
  nb::object runner_;
};

}  // namespace

std::shared_ptr<parallel::CommHook> make_python_comm_hook(nb::object runner) {
  return std::make_shared<PythonCommHook>(std::move(runner));
}

void init_python_comm_hook(nb::module_& m) {
  nb::class_<BucketView>(m, "GradBucket",
                         "A bucket of gradients as a communication hook sees it; the methods are "
                         "those of torch.distributed.GradBucket.")
      .def(
          "index", [](const BucketView& self) { return self.bucket.index; },
          "Position in the launch order, from 0.")
      .def(
          "is_last", [](const BucketView& self) { return self.bucket.is_last; },
          "True for the last bucket of this backward.")
      .def(
          "buffer", [](const BucketView& self) { return self.bucket.buffer; },
          "The gradients, one after another: a 1-D tensor.")
      .def(
          "gradients", [](const BucketView& self) { return self.bucket.gradients; },
          "Views of the buffer, shaped like the parameters.")
      .def(
          "parameters", [](const BucketView& self) { return self.bucket.parameters; },
          "The parameters, in the order of gradients().");

  nb::class_<Completion>(m, "Completion", "Takes the result of a communication hook.")
      .def(
          "complete",
          [](const Completion& self, const at::Tensor& result) {
            self.future->markCompleted(c10::IValue(result));
          },
          nb::arg("result"))
      .def(
          "fail",
          [](const Completion& self, const std::string& message) {
            self.future->setError(std::make_exception_ptr(Error(message)));
          },
          nb::arg("message"));
}

}  // namespace apex::python
