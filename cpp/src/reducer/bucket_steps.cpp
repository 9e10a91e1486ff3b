// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/bucket_steps.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "reducer/profiler_range.h"
#include "tensor_memory.h"

namespace apex::parallel::detail {

namespace {

/// Makes the current stream wait for the streams that produced the gradients.
void join_producers(const PlannedBucket& entry) {
  const at::Device device = entry.message.device();
  if (device.is_cpu() || entry.producers.empty()) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  for (const c10::Stream& producer : entry.producers) {
    if (producer == current) continue;
    // Recorded now, after every gradient that was enqueued on the producer so far.
    c10::Event event(device.type());
    event.record(producer);
    event.block(current);
  }
  for (const BucketMessage::Slot& slot : entry.message.slots()) {
    // The allocator must not reuse a gradient's memory on the stream that allocated it, which may
    // be none of the producers, while this stream reads it.
    const at::Tensor& grad = slot.variable.grad();
    if (grad.defined() && (has_memory(grad) || grad.layout() != at::kStrided))
      grad.record_stream(current);
  }
}

void keep_for_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || !has_memory(tensor) || tensor.is_cpu()) return;
  const c10::Stream current =
      c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
  tensor.record_stream(current);
}

/// Gradients, and a buffer from a hook, belong to the streams that allocated them. The stream that
/// ends backward reads and writes them, and until it is done the allocator must not reuse their
/// memory on the other streams. In a recorded backward, the allocating streams are unknown.
void keep_for_current_stream(PlannedBucket& entry) {
  BucketMessage& message = entry.message;
  if (message.device().is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(message.device().type());
  const c10::Stream current = guard.getStream(message.device());
  const auto is_current = [&](const c10::Stream& producer) { return producer == current; };
  if (!entry.producers.empty() &&
      std::all_of(entry.producers.begin(), entry.producers.end(), is_current))
    return;
  keep_for_current_stream(message.tensor());
  keep_for_current_stream(message.gradients_buffer());
  for (const BucketMessage::Slot& slot : message.slots()) {
    keep_for_current_stream(slot.variable.grad());
    keep_for_current_stream(slot.own);
  }
}

/// The name of a bucket for errors. Empty with one rank, because nothing is sent.
std::string name_of(const PlannedBucket& entry, size_t index, const ReducerContext& context) {
  return entry.traits.has_peers || entry.traits.runs_user_code
             ? describe_bucket(entry, index, context)
             : "";
}

}  // namespace

void launch_bucket(PlannedBucket& entry, size_t index, const BackwardPass& pass,
                   ReducerContext& context, const std::function<void()>& packed) {
  const ProfilerRange range("apex::reducer::launch_bucket");
  const c10::OptionalDeviceGuard guard(entry.message.device());
  join_producers(entry);
  BucketMessage& message = entry.message;
  message.pack(pass.used, pass.kept, entry.averaging(context).before);
  // A failed backward may free the buffer while this stream, which need not be the one that
  // allocated it, writes to it.
  keep_for_current_stream(message.tensor());
  keep_for_current_stream(message.gradients_buffer());
  if (packed) packed();
  context.statistics.add(&ReducerStatistics::gradients_copied, message.copied());
  if (entry.traits.shares_memory)
    context.statistics.add(&ReducerStatistics::reduced_in_shared_memory);
  if (entry.traits.across_hosts) context.statistics.add(&ReducerStatistics::reduced_by_host);
  const std::string what = name_of(entry, index, context);
  entry.launched = true;  // not before: if packing throws, zeros must be sent
  entry.reduction->start(message, message.tensor(), what);
}

void launch_absent(std::vector<PlannedBucket>& entries, bool failed, ReducerContext& context,
                   const std::function<void(const at::Tensor& tail)>& write_report) {
  // If reports are not read, zeros would not be detected.
  const bool poison = failed && !context.reads_reports();
  for (size_t b = 0; b < entries.size(); ++b) {
    PlannedBucket& entry = entries[b];
    if (entry.launched) continue;
    entry.launched = true;
    // Also for a bucket from before the failure, whose hook may have collectives left to issue.
    if (b > 0) let_next_pass(entries[b - 1], b - 1, context);
    const c10::OptionalDeviceGuard guard(entry.message.device());
    // The last backward may still use the buffer, on a stream for which this one does not wait.
    if (entry.unpacked_on) entry.producers.push_back(*entry.unpacked_on);
    join_producers(entry);
    entry.message.blank(poison);
    const at::Tensor& tensor = entry.message.tensor();
    if (entry.message.has_tail()) write_report(entry.message.tail_of(tensor));
    keep_for_current_stream(tensor);
    // The name must be the same as on ranks that send gradients: see Note [Ranks in different
    // collectives].
    entry.reduction->start(entry.message, tensor, describe_bucket(entry, b, context));
  }
  // The report follows.
  if (!entries.empty()) let_next_pass(entries.back(), entries.size() - 1, context);
}

void let_next_pass(PlannedBucket& entry, size_t index, ReducerContext& context) {
  if (!entry.reduction->holds_back_next()) return;
  const std::string what = describe_bucket(entry, index, context);
  entry.reduction->wait(what, {});
}

void await_bucket(PlannedBucket& entry, size_t index, const std::function<void()>& meanwhile,
                  ReducerContext& context) {
  const c10::OptionalDeviceGuard guard(entry.message.device());
  const std::string what = name_of(entry, index, context);
  entry.reduction->wait(what, meanwhile);
}

void hand_out_bucket(PlannedBucket& entry, const BackwardPass& pass, ReducerContext& context) {
  const c10::OptionalDeviceGuard guard(entry.message.device());
  const at::Device device = entry.message.device();
  if (!device.is_cpu())
    entry.unpacked_on = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  entry.reduction->deliver(entry.message);
  keep_for_current_stream(entry);
  entry.message.unpack(entry.averaging(context).after, pass.used_by_any);
}

}  // namespace apex::parallel::detail
