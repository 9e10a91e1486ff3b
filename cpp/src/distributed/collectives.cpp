// SPDX-License-Identifier: BSD-3-Clause
#include <apex/distributed.h>

#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <apex/error.h>

#include "comm/collectives.h"

namespace apex::distributed {

namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The group of a call, after its tensor was checked.
GroupPtr group_for(const at::Tensor& tensor, const char* what, const GroupPtr& group) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.is_contiguous())
    throw InvalidArgument(std::string(what) + ": the tensor is undefined or not contiguous");
  if (tensor.is_conj() || tensor.is_neg())
    throw InvalidArgument(std::string(what) +
                          ": the tensor is a lazy conjugate; call resolve_conj() first");
  return group ? group : get_default_group();
}

using Op = c10d::ReduceOp;

/// Gloo, NCCL and shared memory support different sets. This is their intersection, so that a
/// program does not depend on where its ranks run.
void require_reducible(const at::Tensor& tensor, Op::RedOpType op, const char* what) {
  const at::ScalarType dtype = tensor.scalar_type();
  const bool complex = dtype == at::kComplexFloat || dtype == at::kComplexDouble;
  const bool real = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
                    dtype == at::kBFloat16 || dtype == at::kByte || dtype == at::kChar ||
                    dtype == at::kInt || dtype == at::kLong;
  if (op == Op::SUM && (real || complex)) return;
  if (real && (op == Op::PRODUCT || op == Op::MIN || op == Op::MAX)) return;
  throw InvalidArgument(std::string(what) + ": unsupported reduction of " + c10::toString(dtype) +
                        "; supported are SUM, PRODUCT, MIN and MAX of uint8, int8, int32, int64, "
                        "float16, bfloat16, float32 and float64, and SUM of complex64 and "
                        "complex128; divide the sum for an average");
}

/// Data that is only moved is sent as bytes, since backends do not support every dtype.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

}  // namespace

void all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op, const GroupPtr& group) {
  constexpr const char* kWhat = "all_reduce()";
  const at::NoGradGuard no_grad;
  const GroupPtr among = group_for(tensor, kWhat, group);
  require_reducible(tensor, op, kWhat);
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  parallel::run_collective(kWhat, *among,
                           [&] { return parallel::issue_all_reduce(kWhat, *among, real, op); });
}

void broadcast(const at::Tensor& tensor, int root, const GroupPtr& group) {
  constexpr const char* kWhat = "broadcast()";
  const at::NoGradGuard no_grad;
  const GroupPtr among = group_for(tensor, kWhat, group);
  if (root < 0 || root >= among->getSize()) {
    throw InvalidArgument("broadcast(): root rank " + std::to_string(root) +
                          " is not in the group of " + std::to_string(among->getSize()) + " ranks");
  }
  parallel::run_collective(kWhat, *among, [&] {
    return parallel::issue_broadcast(kWhat, *among, as_bytes(tensor), root);
  });
}

at::Tensor all_gather(const at::Tensor& tensor, const GroupPtr& group) {
  constexpr const char* kWhat = "all_gather()";
  const at::NoGradGuard no_grad;
  const GroupPtr among = group_for(tensor, kWhat, group);
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), among->getSize());
  at::Tensor all = at::empty(shape, tensor.options());
  parallel::run_collective(kWhat, *among, [&] {
    return parallel::issue_all_gather(kWhat, *among, as_bytes(all), as_bytes(tensor));
  });
  return all;
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const GroupPtr& group) {
  constexpr const char* kWhat = "reduce_scatter()";
  const at::NoGradGuard no_grad;
  const GroupPtr among = group_for(tensor, kWhat, group);
  if (tensor.dim() == 0 || tensor.size(0) != among->getSize()) {
    throw InvalidArgument("reduce_scatter(): the first dimension of the tensor must be " +
                          std::to_string(among->getSize()) + ", the number of ranks");
  }
  require_reducible(tensor, Op::SUM, kWhat);
  at::Tensor received = at::empty_like(tensor);
  parallel::run_collective(kWhat, *among, [&] {
    return parallel::issue_all_to_all(kWhat, *among, as_bytes(received), as_bytes(tensor));
  });
  return at::sum(received, {0}, /*keepdim=*/false, tensor.scalar_type());
}

}  // namespace apex::distributed
