#include <utility>

#include <ATen/Functions.h>

#include "parallel/reducer_state.h"

namespace apex::parallel::detail {

namespace {

/// Of the message that is sent, or of the gradients that a communication hook is given.
int64_t bytes_of(const at::Tensor& message) {
  if (message.layout() != at::kSparse) return static_cast<int64_t>(message.nbytes());
  return static_cast<int64_t>(message._indices().nbytes() + message._values().nbytes());
}

}  // namespace

void ReducerState::time_begin() {
  std::optional<c10::Device> device;
  bool several = false;
  for (const Parameter& parameter : parameters_) {
    if (!parameter.trainable) continue;
    several = several || (device && *device != parameter.device);
    device = parameter.device;
  }
  if (!device) device = c10::Device(at::kCPU);  // frozen on this rank, and zeros for the others
  if (several) device.reset();
  overlap_->begin(device, parameters_.size());
}

void ReducerState::time_launch(size_t index) {
  const Bucket& bucket = entries_[index].bucket;
  std::vector<int64_t> members;
  for (const Bucket::Slot& slot : bucket.slots()) members.push_back(slot.parameter);
  const bool hooked = comm_hook_ && entries_[index].goes_through_hook();
  overlap_->launched(index, std::move(members), bytes_of(hooked ? bucket.data() : bucket.message()));
}

std::optional<OverlapReport> ReducerState::overlap_report() const {
  if (!overlap_) return std::nullopt;
  std::optional<OverlapReport> report = overlap_->report();
  if (!report) return report;
  for (BucketOverlap& bucket : report->buckets) {
    for (const int64_t parameter : bucket.parameters) bucket.names.push_back(parameters_[parameter].name);
  }
  return report;
}

}  // namespace apex::parallel::detail
