// SPDX-License-Identifier: BSD-3-Clause
#include "tensor_parts.h"

#include <exception>
#include <mutex>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <apex/error.h>

#include "plain_text.h"

namespace apex {

namespace {

using Parts = std::function<std::vector<at::Tensor>(const at::Tensor&)>;

struct Finder {
  std::mutex mutex;  ///< guards the functions
  Parts parts;
  std::function<void()> keep_error;
};

Finder& finder() {
  static auto* const instance = new Finder;  // never destroyed: other threads may outlive main()
  return *instance;
}

std::vector<at::Tensor> direct_parts(const at::Tensor& tensor) {
  Parts function;
  {
    const std::lock_guard<std::mutex> lock(finder().mutex);
    function = finder().parts;
  }
  return function ? function(tensor) : std::vector<at::Tensor>();
}

void collect(const at::Tensor& tensor, std::vector<at::Tensor>& found) {
  const bool may_have_parts =
      tensor.layout() == at::kStrided && !tensor.is_meta() && !has_memory(tensor);
  const std::vector<at::Tensor> parts =
      may_have_parts ? direct_parts(tensor) : std::vector<at::Tensor>();
  if (parts.empty()) found.push_back(tensor);
  for (const at::Tensor& part : parts) collect(part, found);
}

}  // namespace

void set_tensor_parts(Parts parts, std::function<void()> keep_error) {
  const std::lock_guard<std::mutex> lock(finder().mutex);
  finder().parts = std::move(parts);
  finder().keep_error = std::move(keep_error);
}

void keep_error() {
  std::function<void()> function;
  {
    const std::lock_guard<std::mutex> lock(finder().mutex);
    function = finder().keep_error;
  }
  if (function) function();
}

bool has_memory(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!impl.has_storage() || tensor.is_meta() || tensor.layout() != at::kStrided) return false;
  // Skips the checks that throw if the storage has no data.
  return impl.unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() !=
             nullptr ||
         (tensor.numel() == 0 && !tensor.key_set().has(c10::DispatchKey::Python));
}

std::vector<at::Tensor> parts_of(const at::Tensor& tensor) {
  std::vector<at::Tensor> found;
  collect(tensor, found);
  return found;
}

at::Tensor in_memory(const at::Tensor& tensor) {
  if (has_memory(tensor)) return tensor;
  if (tensor.layout() != at::kStrided) return tensor.to_dense();
  const c10::DispatchKeySet keys = tensor.key_set();
  if (tensor.unsafeGetTensorImpl()->has_storage() && !keys.has(c10::DispatchKey::Python) &&
      !keys.has(c10::DispatchKey::ZeroTensor) && tensor.numel() > 0) {
    throw Error("its memory has been freed");  // by resize_(0) of its storage; a copy would crash
  }
  at::Tensor copy = at::empty(
      tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device()));
  return by_operators([&] { return copy.copy_(tensor); });
}

std::string why_not_sendable(const at::Tensor& tensor) {
  if (tensor.is_meta()) return "it is on the meta device, and has no values yet";
  try {
    for (const at::Tensor& part : parts_of(tensor)) {
      parallel::PlainText out;
      if (part.is_quantized()) {
        out << "its dtype is quantized (" << part.scalar_type() << ')';
      } else if (part.layout() != at::kStrided) {
        out << "its layout is " << part.layout() << ", not strided";
      } else {
        in_memory(part);  // throws if its operators cannot copy it
      }
      if (!out.str().empty()) return out.str();
    }
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace apex
