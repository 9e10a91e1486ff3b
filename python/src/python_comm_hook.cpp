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
  at::Tensor buffer;  // bucket.buffer, or what set_buffer() replaced it by

  void set_buffer(at::Tensor other) {
    if (other.numel() != buffer.numel() || !other.is_contiguous()) {
      throw InvalidArgument("set_buffer() takes a contiguous tensor of the bucket's " +
                            std::to_string(buffer.numel()) + " elements, got one of shape " +
                            c10::str(other.sizes()) + " and strides " + c10::str(other.strides()));
    }
    buffer = std::move(other);
  }

  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> views = bucket.gradients;
    if (buffer.is_same(bucket.buffer)) return views;
    for (at::Tensor& view : views) view = in_new_buffer(view);
    return views;
  }

 private:
  /// The view of the new buffer at the position of `own` in the bucket's own buffer.
  at::Tensor in_new_buffer(const at::Tensor& own) const {
    if (own.numel() == 0) return at::empty(own.sizes(), buffer.options());
    const auto bytes = static_cast<const char*>(own.const_data_ptr()) -
                       static_cast<const char*>(bucket.buffer.const_data_ptr());
    at::Tensor flat = buffer.view(-1).slice(0, bytes / bucket.buffer.element_size());
    if (own.is_complex()) {  // a complex gradient takes two numbers of the buffer
      flat = at::view_as_complex(flat.slice(0, 0, 2 * own.numel()).view({-1, 2}));
    }
    return flat.as_strided(own.sizes(), own.strides(), flat.storage_offset());
  }
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
      runner_(BucketView{bucket, bucket.buffer}, Completion{future});
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
          "buffer", [](const BucketView& self) { return self.buffer; },
          "The gradients, one after another: a 1-D tensor.")
      .def("set_buffer", &BucketView::set_buffer, nb::arg("buffer"),
           "Replaces the tensor that buffer() returns and gradients() are views of.")
      .def("gradients", &BucketView::gradients, "Views of the buffer, shaped like the parameters.")
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
