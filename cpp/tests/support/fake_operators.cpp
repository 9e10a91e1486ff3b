// SPDX-License-Identifier: BSD-3-Clause
#include <support/fake_device.h>

#include <support/fake_capture.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

// Operators of the fake device: one boxed function for all of them. It calls the CPU kernel on CPU
// tensors with the same memory. It reports accesses to the detector according to the operator's
// schema: an argument that is written is a write, one that is only viewed (annotated, but not
// written) is no access, and any other is a read.

namespace apex::testing::fake {
namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;

bool is_written(const c10::AliasInfo* info) {
  if (info == nullptr) return false;
  if (info->isWrite()) return true;
  for (const c10::AliasInfo& contained : info->containedTypes()) {
    if (contained.isWrite()) return true;
  }
  return false;
}

at::Tensor tensor_in(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

c10::Storage alias_of(const c10::Storage& storage) {
  return {c10::Storage::use_byte_size_t(), storage.nbytes(),
          c10::DataPtr(storage.mutable_data(), c10::Device(at::kCPU)), nullptr,
          /*resizable=*/false};
}

/// One operator call, run by the CPU kernel.
class Call {
 public:
  explicit Call(const c10::FunctionSchema& schema) : schema_(schema) {}

  c10::IValue to_host(const c10::IValue& value, const c10::AliasInfo* alias) {
    if (value.isTensor()) return tensor_to_host(value.toTensor(), alias);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector())
        list.push_back(tensor_to_host(tensor, alias));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(tensor_to_host(*tensor, alias))
                              : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice() == device()) return c10::Device(at::kCPU);
    return value;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return tensor_to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector())
        list.push_back(tensor_to_device(tensor));
      return list;
    }
    if (!value.isNone()) returns_value_ = true;
    return value;
  }

  /// `again` is passed to the capture in progress: it recomputes the operator's results.
  void finish(bool non_blocking, std::function<std::vector<at::Tensor>()> again) {
    if (accesses_.empty()) return;  // a view
    const c10::Stream stream = current_stream();
    detector().operate(stream.id(), schema_.name(), accesses_);
    Capture::operate(stream.id(), schema_.name(), accesses_,
                     [kept = passed_, fresh = fresh_, again = std::move(again)] {
                       const std::vector<at::Tensor> results = again();
                       for (const auto& [index, target] : fresh) {
                         host_alias(target).copy_(results.at(index));
                       }
                     });
    const bool copies = schema_.name() == "aten::copy_" && with_host_ && !non_blocking;
    if (returns_value_ || copies) {
      Capture::host(schema_.name(), Capture::of(stream.id()));
      detector().host_waits(detector().record(stream.id()), schema_.name());
    }
  }

 private:
  struct Passed {
    at::Tensor original;
    at::Tensor alias;  ///< the original itself if that is a CPU tensor
  };

  at::Tensor tensor_to_host(const at::Tensor& tensor, const c10::AliasInfo* alias) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      with_host_ = true;
      passed_.push_back({tensor, tensor});
      return tensor;
    }
    const bool writes = is_written(alias);
    if (alias == nullptr || writes) {
      for (const auto& access : fake::access(tensor, writes)) accesses_.push_back(access);
    }
    passed_.push_back({tensor, host_alias(tensor)});
    return passed_.back().alias;
  }

  at::Tensor tensor_to_device(const at::Tensor& result) {
    const size_t index = results_++;
    if (!result.defined()) return result;
    for (const Passed& passed : passed_) {
      if (passed.alias.is_same(result)) return passed.original;
    }
    for (const Passed& passed : passed_) {
      if (passed.alias.storage().data() != result.storage().data() ||
          result.storage().data() == nullptr) {
        continue;
      }
      if (!passed.original.is_privateuseone()) return result;
      return tensor_in(passed.original.storage(), kKey, result);
    }
    at::Tensor fresh =
        at::empty_strided(result.sizes(), result.strides(), result.options().device(device()));
    const size_t bytes =
        at::detail::computeStorageNbytes(result.sizes(), result.strides(), result.element_size());
    if (bytes > 0) std::memcpy(fresh.storage().mutable_data(), result.const_data_ptr(), bytes);
    for (const auto& access : fake::access(fresh, /*writes=*/true)) accesses_.push_back(access);
    fresh_.emplace_back(index, fresh);
    return fresh;
  }

  const c10::FunctionSchema& schema_;
  std::vector<Passed> passed_;
  std::vector<RaceDetector::Access> accesses_;
  size_t results_ = 0;                                ///< number of result tensors so far
  std::vector<std::pair<size_t, at::Tensor>> fresh_;  ///< results with their own memory, by index
  bool with_host_ = false;                            ///< CPU tensors take part
  bool returns_value_ = false;  ///< returns something other than a tensor, so the host waits
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t arguments = schema.arguments().size();
  const size_t first = stack->size() - arguments;
  Call call(schema);
  bool non_blocking = false;
  for (size_t i = 0; i < arguments; ++i) {
    c10::IValue& value = (*stack)[first + i];
    const c10::Argument& argument = schema.arguments()[i];
    if (argument.name() == "non_blocking" && value.isBool()) non_blocking = value.toBool();
    value = call.to_host(value, argument.alias_info());
  }
  const torch::jit::Stack before(stack->end() - static_cast<std::ptrdiff_t>(arguments),
                                 stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = call.to_device((*stack)[i]);
  }
  call.finish(non_blocking, [op, before] {
    torch::jit::Stack again = before;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &again);
    std::vector<at::Tensor> results;
    for (const c10::IValue& value : again) {
      if (value.isTensor()) results.push_back(value.toTensor());
      if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) results.push_back(tensor);
      }
    }
    return results;
  });
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, c10::GetAllocator(c10::DeviceType::PrivateUse1),
                                   c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride,
                                           c10::GetAllocator(c10::DeviceType::PrivateUse1),
                                           c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { used_on(tensor, stream); }

}  // namespace

at::Tensor host_alias(const at::Tensor& tensor) {
  return tensor_in(alias_of(tensor.storage()), c10::DispatchKey::CPU, tensor);
}

at::Tensor peek(const at::Tensor& tensor) {
  return tensor.is_privateuseone() ? host_alias(tensor).clone() : tensor.detach().clone();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("record_stream", record_stream);
  // These operators have kernels for all devices. copy_ dispatches on device names. Multi-tensor
  // operators would process one tensor after another, unlike on a GPU.
  for (const char* name : {"copy_", "_foreach_copy_", "_foreach_mul_.Scalar", "_foreach_zero_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace apex::testing::fake
