// SPDX-License-Identifier: BSD-3-Clause
#include "c_api/notified_reducer.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <apex/error.h>
#include <apex/parallel/bucket_assignment.h>
#include <apex/parallel/model_sync.h>

#include "comm/collectives.h"

namespace apex::parallel::detail {

namespace {

std::vector<NamedTensor> named(const std::vector<at::Tensor>& parameters) {
  std::vector<NamedTensor> list;
  for (const at::Tensor& parameter : parameters) {
    list.push_back({"parameter " + std::to_string(list.size()), parameter});
  }
  return list;
}

void require_gradients_fit(const std::vector<at::Tensor>& parameters,
                           const std::vector<at::Tensor>& gradients) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor &parameter = parameters[i], &gradient = gradients[i];
    if (at::isFloatingType(gradient.scalar_type()) && gradient.sizes() == parameter.sizes() &&
        gradient.scalar_type() == parameter.scalar_type() &&
        gradient.device() == parameter.device() &&
        at::has_internal_overlap(gradient) != at::MemOverlap::Yes) {
      continue;
    }
    throw InvalidArgument("gradient " + std::to_string(i) +
                          " has to have the shape, the device and the floating dtype of its "
                          "parameter, and a place in memory for each element (no stride 0)");
  }
}

BucketPlan plan_buckets(const std::vector<at::Tensor>& gradients, int64_t bucket_bytes) {
  std::vector<ParameterInfo> infos;
  std::vector<int64_t> order;
  for (const at::Tensor& gradient : gradients) {
    infos.push_back({gradient.numel(), gradient.scalar_type(), gradient.device()});
    order.insert(order.begin(), static_cast<int64_t>(order.size()));
  }
  BucketLimits limits;
  limits.cap = bucket_bytes;
  limits.unit = BucketLimits::Unit::kBytes;
  return assign_buckets(infos, order, limits);
}

}  // namespace

NotifiedReducer::NotifiedReducer(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                 const std::vector<at::Tensor>& parameters,
                                 std::vector<at::Tensor> gradients, int64_t bucket_bytes)
    : members_(std::vector<GroupPtr>{std::move(group)}), gradients_(std::move(gradients)) {
  const at::NoGradGuard no_grad;
  require_gradients_fit(parameters, gradients_);
  const BucketPlan plan = plan_buckets(gradients_, bucket_bytes);
  verify_same_model(named(parameters), {"bucket_bytes=" + std::to_string(bucket_bytes)},
                    members_.parent);
  broadcast_coalesced(parameters, members_.parent);
  // Note [An order of one's own]
  if (!gradients_.empty()) members_.device = gradients_.front().device();
  members_.separate(std::any_of(gradients_.begin(), gradients_.end(),
                                [](const at::Tensor& gradient) { return gradient.is_cpu(); }));
  places_.resize(gradients_.size());
  for (const std::vector<int64_t>& members : plan.buckets) {
    Bucket bucket;
    bucket.what = "all-reduce of bucket " + std::to_string(buckets_.size());
    int64_t numel = 0;
    for (const int64_t member : members) {
      bucket.members.push_back(static_cast<size_t>(member));
      numel += gradients_[bucket.members.back()].numel();
    }
    bucket.buffer = at::zeros({numel}, gradients_[bucket.members.front()].options());
    int64_t offset = 0;
    for (const size_t member : bucket.members) {
      const at::Tensor& gradient = gradients_[member];
      places_[member].bucket = buckets_.size();
      places_[member].view =
          bucket.buffer.narrow(0, offset, gradient.numel()).view(gradient.sizes());
      offset += gradient.numel();
    }
    buckets_.push_back(std::move(bucket));
  }
  begin_step();
}

NotifiedReducer::~NotifiedReducer() {
  for (Bucket& bucket : buckets_) {
    try {
      // Its memory is on its way to other ranks.
      if (bucket.work) wait_collective(bucket.work, bucket.what, *members_.control());
    } catch (const std::exception&) {
      // Nobody asks for these gradients any more.
    }
  }
}

void NotifiedReducer::begin_step() {
  for (Place& place : places_) place.ready = false;
  for (Bucket& bucket : buckets_) {
    bucket.missing = bucket.members.size();
    bucket.work.reset();
  }
  launched_ = 0;
}

void NotifiedReducer::gradient_ready(size_t index) {
  if (index >= places_.size()) {
    throw InvalidArgument("there is no gradient " + std::to_string(index) + " among " +
                          std::to_string(places_.size()));
  }
  Place& place = places_[index];
  if (place.ready) {
    throw InvalidArgument("gradient " + std::to_string(index) +
                          " was announced twice; synchronize between two steps");
  }
  const at::NoGradGuard no_grad;
  place.view.copy_(gradients_[index]);
  place.ready = true;
  --buckets_[place.bucket].missing;
  launch_complete(/*all=*/false);
}

/// In the order of the plan, which is the same on every rank, whatever order gradients come in.
void NotifiedReducer::launch_complete(bool all) {
  for (; launched_ < buckets_.size(); ++launched_) {
    Bucket& bucket = buckets_[launched_];
    if (bucket.missing > 0 && !all) return;
    for (const size_t member : bucket.members) {
      if (!places_[member].ready) places_[member].view.zero_();
    }
    if (members_.size > 1 && bucket.buffer.numel() > 0)
      bucket.work = issue_all_reduce(bucket.what, *members_.control(), bucket.buffer);
  }
}

void NotifiedReducer::synchronize() {
  const at::NoGradGuard no_grad;
  try {
    launch_complete(/*all=*/true);
    for (Bucket& bucket : buckets_) {
      if (bucket.work) wait_collective(bucket.work, bucket.what, *members_.control());
      bucket.work.reset();
      bucket.buffer.div_(members_.size);
      for (const size_t member : bucket.members) {
        gradients_[member].copy_(places_[member].view);
      }
    }
  } catch (...) {
    begin_step();
    throw;
  }
  begin_step();
}

}  // namespace apex::parallel::detail
