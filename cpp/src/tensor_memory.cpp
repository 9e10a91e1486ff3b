// SPDX-License-Identifier: BSD-3-Clause
#include "tensor_memory.h"

#include <ATen/Functions.h>

#include <apex/error.h>

#include "plain_text.h"

namespace apex {

namespace {

constexpr const char* kFreed = "its memory has been freed";

/// By resize_(0) of its storage; a copy would crash.
bool is_freed(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  return tensor.unsafeGetTensorImpl()->has_storage() && !has_memory(tensor) &&
         !keys.has(c10::DispatchKey::Python) && !keys.has(c10::DispatchKey::ZeroTensor) &&
         tensor.numel() > 0;
}

}  // namespace

bool has_memory(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!impl.has_storage() || tensor.is_meta() || tensor.layout() != at::kStrided) return false;
  // Skips the checks that throw if the storage has no data.
  return impl.unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() !=
             nullptr ||
         (tensor.numel() == 0 && !tensor.key_set().has(c10::DispatchKey::Python));
}

at::Tensor in_memory(const at::Tensor& tensor) {
  if (has_memory(tensor)) return tensor;
  if (tensor.layout() != at::kStrided) return tensor.to_dense();
  if (is_freed(tensor)) throw Error(kFreed);
  return at::empty(tensor.sizes(), at::device(tensor.device()).dtype(tensor.scalar_type()))
      .copy_(tensor);
}

std::string why_not_sendable(const at::Tensor& tensor) {
  parallel::PlainText out;
  if (tensor.is_meta()) {
    out << "it is on the meta device, and has no values yet";
  } else if (tensor.is_quantized()) {
    out << "its dtype is quantized (" << tensor.scalar_type() << ')';
  } else if (tensor.layout() != at::kStrided) {
    out << "its layout is " << tensor.layout() << ", not strided";
  } else if (is_freed(tensor)) {
    out << kFreed;
  }
  return out.str();
}

}  // namespace apex
