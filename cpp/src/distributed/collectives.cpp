#include <apex/distributed/collectives.h>

#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <apex/distributed/process_group.h>
#include <apex/error.h>

#include "comm/collectives.h"

namespace apex::distributed {

namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

GroupPtr group_or_default(const GroupPtr& group) { return group ? group : get_default_group(); }

void require_contiguous(const at::Tensor& tensor, const char* what) {
  if (!tensor.defined() || !tensor.is_contiguous())
    throw InvalidArgument(std::string(what) + ": the tensor is undefined or not contiguous");
}

}  // namespace

void all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op, const GroupPtr& group) {
  constexpr const char* kWhat = "all_reduce()";
  require_contiguous(tensor, kWhat);
  const at::NoGradGuard no_grad;
  const GroupPtr among = group_or_default(group);
  parallel::run_collective(kWhat, *among,
                           [&] { return parallel::issue_all_reduce(kWhat, *among, tensor, op); });
}

void broadcast(const at::Tensor& tensor, int root, const GroupPtr& group) {
  constexpr const char* kWhat = "broadcast()";
  require_contiguous(tensor, kWhat);
  const at::NoGradGuard no_grad;
  const GroupPtr among = group_or_default(group);
  if (root < 0 || root >= among->getSize()) {
    throw InvalidArgument("broadcast(): there is no rank " + std::to_string(root) + " among " +
                          std::to_string(among->getSize()));
  }
  parallel::run_collective(kWhat, *among,
                           [&] { return parallel::issue_broadcast(kWhat, *among, tensor, root); });
}

at::Tensor all_gather(const at::Tensor& tensor, const GroupPtr& group) {
  constexpr const char* kWhat = "all_gather()";
  require_contiguous(tensor, kWhat);
  const at::NoGradGuard no_grad;
  const GroupPtr among = group_or_default(group);
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), among->getSize());
  at::Tensor all = at::empty(shape, tensor.options());
  parallel::run_collective(kWhat, *among, [&] {
    return parallel::issue_all_gather(kWhat, *among, all.view({-1}), tensor.view({-1}));
  });
  return all;
}

}  // namespace apex::distributed
