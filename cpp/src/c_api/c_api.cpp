// SPDX-License-Identifier: BSD-3-Clause
#include <apex/c_api.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/types.h>

#include <apex/distributed/collectives.h>
#include <apex/distributed/process_group.h>
#include <apex/error.h>
#include <apex/parallel/reducer.h>
#include <apex/version.h>

#include "c_api/notified_reducer.h"
#include "comm/error_text.h"

struct apex_group {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

/// Exactly one of the members is set.
struct apex_reducer {
  std::unique_ptr<apex::parallel::detail::NotifiedReducer> notified;
  std::unique_ptr<apex::parallel::Reducer> torch;
};

namespace {

using apex::InvalidArgument;

std::string& last_error() {
  thread_local std::string text;
  return text;
}

apex_status status_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument&) {
    return APEX_INVALID_ARGUMENT;
  } catch (const apex::RankMismatch&) {
    return APEX_RANK_MISMATCH;
  } catch (const apex::CommunicationError&) {
    return APEX_COMMUNICATION;
  } catch (...) {
    return APEX_ERROR;
  }
}

template <typename Call>
apex_status guarded(const char* function, const Call& call) noexcept {
  try {
    call();
    return APEX_OK;
  } catch (...) {
    const auto error = std::current_exception();
    try {
      std::string text = apex::parallel::message_of(error);
      // Messages name the interface of C++ and Python.
      if (text.find(" weight()") != std::string::npos)
        text += " (in C, weight() is apex_reducer_set_weight())";
      last_error() = std::string(function) + "(): " + text;
    } catch (...) {
      // Out of memory for the message.
    }
    return status_of(error);
  }
}

template <typename T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) throw InvalidArgument(std::string(name) + " is NULL");
  return *pointer;
}

at::ScalarType scalar_type(apex_dtype dtype) {
  switch (dtype) {
    case APEX_UINT8:
      return at::kByte;
    case APEX_INT32:
      return at::kInt;
    case APEX_INT64:
      return at::kLong;
    case APEX_FLOAT16:
      return at::kHalf;
    case APEX_BFLOAT16:
      return at::kBFloat16;
    case APEX_FLOAT32:
      return at::kFloat;
    case APEX_FLOAT64:
      return at::kDouble;
  }
  throw InvalidArgument("unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

/// a * b + c for numbers that are not negative. Throws if it overflows.
int64_t within_64_bits(int64_t a, int64_t b, int64_t c = 0) {
  if (b == 0 || a <= (std::numeric_limits<int64_t>::max() - c) / b) return a * b + c;
  throw InvalidArgument("a tensor spans more than 2^63 bytes: check its sizes and strides");
}

/// Throws if the number of elements or the distance from the first element to the last, in bytes,
/// exceeds 64 bits. Empty strides mean contiguous.
void require_addressable(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  int64_t numel = 1, end = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t size = std::max<int64_t>(sizes[i], 1);  // like torch's strides
    numel = within_64_bits(numel, size);
    if (!strides.empty()) end = within_64_bits(size - 1, strides[i], end);
  }
  within_64_bits(std::max(numel, end), static_cast<int64_t>(c10::elementSize(dtype)));
}

/// Checks the device itself, because torch's error would be a page about its dispatcher.
at::Device device_of(int32_t number) {
  if (number == -1) return at::kCPU;
  const int32_t count =
      c10::impl::hasDeviceGuardImpl(at::kCUDA)
          ? static_cast<int32_t>(c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount())
          : 0;
  if (number >= 0 && number < count) {
    return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(number));
  }
  throw InvalidArgument("the device of a tensor is " + std::to_string(number) +
                        "; it must be -1 (the CPU) or the index of a CUDA device, of which there " +
                        (count == 1 ? "is 1" : "are " + std::to_string(count)) + " here");
}

at::Tensor tensor_of(const apex_tensor& from) {
  if (from.dim < 0 || (from.dim > 0 && from.sizes == nullptr)) {
    throw InvalidArgument("the sizes of a tensor are NULL, or its dim is negative");
  }
  const at::IntArrayRef sizes(from.sizes, static_cast<size_t>(from.dim));
  const at::ScalarType dtype = scalar_type(from.dtype);
  bool empty = false;
  for (const int64_t size : sizes) {
    if (size < 0) throw InvalidArgument("a tensor has the negative size " + std::to_string(size));
    empty = empty || size == 0;
  }
  if (!empty && from.data == nullptr) throw InvalidArgument("the data pointer of a tensor is NULL");
  const auto options = at::TensorOptions(dtype).device(device_of(from.device));
  if (from.strides == nullptr) {
    require_addressable(sizes, {}, dtype);
    return at::from_blob(from.data, sizes, options);
  }
  const at::IntArrayRef strides(from.strides, sizes.size());
  for (const int64_t stride : strides) {
    if (stride < 0) throw InvalidArgument("a tensor has a negative stride");
  }
  require_addressable(sizes, strides, dtype);
  return at::from_blob(from.data, sizes, strides, options);
}

std::vector<at::Tensor> tensors_of(const apex_tensor* from, size_t count, const char* name) {
  if (count > 0) required(from, name);
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < count; ++i) tensors.push_back(tensor_of(from[i]));
  return tensors;
}

const c10::intrusive_ptr<c10d::ProcessGroup>& group_of(const apex_group* group) {
  return required(group, "group").group;
}

apex::parallel::Reducer& torch_reducer(apex_reducer* reducer) {
  if (!required(reducer, "reducer").torch) {
    throw InvalidArgument("the reducer was not created by apex_reducer_create_torch()");
  }
  return *reducer->torch;
}

apex::parallel::detail::NotifiedReducer& notified_reducer(apex_reducer* reducer) {
  if (!required(reducer, "reducer").notified) {
    throw InvalidArgument("the reducer was not created by apex_reducer_create()");
  }
  return *reducer->notified;
}

void create_notified(const apex_group* group, const apex_tensor* parameters,
                     const apex_tensor* gradients, size_t count, int64_t bucket_bytes,
                     bool weighted, apex_reducer** reducer) {
  required(reducer, "reducer");
  auto made = std::make_unique<apex_reducer>();
  const auto values = tensors_of(parameters, count, "parameters");
  made->notified = std::make_unique<apex::parallel::detail::NotifiedReducer>(
      group_of(group), values, tensors_of(gradients, count, "gradients"), bucket_bytes, weighted);
  *reducer = made.release();
}

void create_torch(const apex_group* group, void* const* parameters, const char* const* names,
                  size_t count, int64_t bucket_bytes, bool weighted, apex_reducer** reducer) {
  required(reducer, "reducer");
  if (count > 0) required(parameters, "parameters");
  std::vector<apex::parallel::NamedTensor> list;
  for (size_t i = 0; i < count; ++i) {
    std::string name = names == nullptr || names[i] == nullptr ? "parameter " + std::to_string(i)
                                                               : std::string(names[i]);
    list.push_back(
        {std::move(name), required(static_cast<at::Tensor*>(parameters[i]), "a parameter")});
  }
  apex::parallel::ReducerOptions options;
  options.weighted = weighted;
  // 0 is the default of C++ and Python; otherwise the same as bucket_cap_mb.
  if (bucket_bytes != 0) options.limits = apex::parallel::BucketLimits::in_bytes(bucket_bytes);
  auto made = std::make_unique<apex_reducer>();
  made->torch = std::make_unique<apex::parallel::Reducer>(
      std::move(list), std::vector{group_of(group)}, std::move(options));
  *reducer = made.release();
}

}  // namespace

const char* apex_last_error(void) { return last_error().c_str(); }

const char* apex_version(void) { return APEX_VERSION; }

apex_status apex_init(const char* backend, const char* init_method, int rank, int world_size,
                      int64_t timeout_ms, apex_group** group) {
  return guarded("apex_init", [&] {
    required(group, "group");
    apex::distributed::ProcessGroupOptions options;
    if (init_method != nullptr) options.init_method(init_method);
    if (rank != -1) options.rank(rank);
    if (world_size != -1) options.world_size(world_size);
    if (timeout_ms != 0) options.timeout(std::chrono::milliseconds(timeout_ms));
    auto made = std::make_unique<apex_group>();
    made->group = apex::distributed::init_process_group(&required(backend, "backend"), options);
    *group = made.release();
  });
}

void apex_shutdown(apex_group* group) {
  const std::unique_ptr<apex_group> owned(group);
  if (!owned) return;
  guarded("apex_shutdown", [&] {
    owned->group.reset();
    apex::distributed::destroy_process_group();
  });
}

int apex_rank(const apex_group* group) { return group == nullptr ? -1 : group->group->getRank(); }

int apex_world_size(const apex_group* group) {
  return group == nullptr ? -1 : group->group->getSize();
}

apex_status apex_all_reduce(apex_group* group, const apex_tensor* tensor, apex_reduce_op op) {
  return guarded("apex_all_reduce", [&] {
    if (op != APEX_SUM && op != APEX_MIN && op != APEX_MAX) {
      throw InvalidArgument("unknown reduction operation " + std::to_string(static_cast<int>(op)));
    }
    const auto kind = op == APEX_SUM   ? c10d::ReduceOp::SUM
                      : op == APEX_MIN ? c10d::ReduceOp::MIN
                                       : c10d::ReduceOp::MAX;
    apex::distributed::all_reduce(tensor_of(required(tensor, "tensor")), kind, group_of(group));
  });
}

apex_status apex_broadcast(apex_group* group, const apex_tensor* tensor, int root) {
  return guarded("apex_broadcast", [&] {
    apex::distributed::broadcast(tensor_of(required(tensor, "tensor")), root, group_of(group));
  });
}

apex_status apex_barrier(apex_group* group) {
  return guarded("apex_barrier", [&] { apex::distributed::barrier(group_of(group)); });
}

apex_status apex_reducer_create(apex_group* group, const apex_tensor* parameters,
                                const apex_tensor* gradients, size_t count, int64_t bucket_bytes,
                                apex_reducer** reducer) {
  return guarded("apex_reducer_create", [&] {
    create_notified(group, parameters, gradients, count, bucket_bytes, false, reducer);
  });
}

apex_status apex_reducer_create_weighted(apex_group* group, const apex_tensor* parameters,
                                         const apex_tensor* gradients, size_t count,
                                         int64_t bucket_bytes, apex_reducer** reducer) {
  return guarded("apex_reducer_create_weighted", [&] {
    create_notified(group, parameters, gradients, count, bucket_bytes, true, reducer);
  });
}

apex_status apex_reducer_set_weight(apex_reducer* reducer, double weight) {
  return guarded("apex_reducer_set_weight", [&] {
    if (required(reducer, "reducer").notified) return reducer->notified->set_weight(weight);
    reducer->torch->end_weight();
    reducer->torch->begin_weight(weight);
  });
}

apex_status apex_reducer_gradient_ready(apex_reducer* reducer, size_t index) {
  return guarded("apex_reducer_gradient_ready",
                 [&] { notified_reducer(reducer).gradient_ready(index); });
}

apex_status apex_reducer_synchronize(apex_reducer* reducer) {
  return guarded("apex_reducer_synchronize", [&] { notified_reducer(reducer).synchronize(); });
}

apex_status apex_reducer_create_torch(apex_group* group, void* const* parameters,
                                      const char* const* names, size_t count, int64_t bucket_bytes,
                                      apex_reducer** reducer) {
  return guarded("apex_reducer_create_torch", [&] {
    create_torch(group, parameters, names, count, bucket_bytes, false, reducer);
  });
}

apex_status apex_reducer_create_torch_weighted(apex_group* group, void* const* parameters,
                                               const char* const* names, size_t count,
                                               int64_t bucket_bytes, apex_reducer** reducer) {
  return guarded("apex_reducer_create_torch_weighted", [&] {
    create_torch(group, parameters, names, count, bucket_bytes, true, reducer);
  });
}

apex_status apex_reducer_prepare_forward(apex_reducer* reducer) {
  return guarded("apex_reducer_prepare_forward",
                 [&] { torch_reducer(reducer).prepare_for_forward(); });
}

apex_status apex_reducer_set_synchronizing(apex_reducer* reducer, int on) {
  return guarded("apex_reducer_set_synchronizing",
                 [&] { torch_reducer(reducer).set_synchronizing(on != 0); });
}

void apex_reducer_destroy(apex_reducer* reducer) { delete reducer; }
