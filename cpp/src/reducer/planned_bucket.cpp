// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/planned_bucket.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "step/report_exchange.h"
#include "tensor_memory.h"

namespace apex::parallel::detail {

namespace {

/// The maximum size of the reports in a bucket. Larger reports are sent separately.
constexpr int64_t kMostOfReports = int64_t{16} << 10;

/// The size of the tail of the last bucket, which carries the reports; 0 if they are sent
/// separately. See Note [How reports travel].
int64_t tail_of(const ReductionSite& site, const ReductionTraits& traits,
                const ReducerContext& context) {
  const bool plain = site.device.is_cpu() && traits.has_peers && !traits.runs_user_code;
  const bool is_exact = site.dtype == at::kFloat || site.dtype == at::kDouble;
  if (!plain || !is_exact || traits.shares_memory || traits.averages || !context.reads_reports())
    return 0;
  const int64_t numel = ReportExchange::tail_size(context.members, context.parameters.size());
  return numel * static_cast<int64_t>(c10::elementSize(site.dtype)) <= kMostOfReports ? numel : 0;
}

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// The allocator must not reuse the memory of `tensor` on the stream that allocated it, which may
/// be none of the producers, while the current stream uses it.
void keep_for_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return;
  if (has_memory(tensor) || tensor.layout() != at::kStrided)
    tensor.record_stream(current_stream(tensor.device()));
}

}  // namespace

PlannedBucket make_bucket(const std::vector<int64_t>& members, size_t index,
                          const std::shared_ptr<CommHook>& hook, bool is_last,
                          ReducerContext& context) {
  const ReducerOptions& options = context.options;
  const Parameter& first = context.parameters[members.front()];
  ReductionSite site;
  site.device = first.kind.device;
  site.dtype = message_dtype(first.kind.dtype, options.allreduce_always_fp32);
  site.index = index;
  site.group = context.members.group_of(index);
  site.all_groups = context.members.groups;
  site.alone = context.members.alone();
  site.plain_average =
      options.gradient_average && !options.weighted && options.gradient_predivide_factor == 1.0;
  site.hook = hook;
  site.is_last = is_last;
  std::unique_ptr<Reduction> reduction = choose_reduction(site);
  const ReductionTraits traits = reduction->traits();
  std::vector<at::Tensor> variables;
  for (const int64_t member : members) variables.push_back(context.parameters[member].variable);
  MessageOptions kind;
  kind.gradient_as_bucket_view = options.gradient_as_bucket_view;
  kind.allreduce_always_fp32 = options.allreduce_always_fp32;
  if (is_last) kind.tail = tail_of(site, traits, context);
  if (traits.shares_memory || traits.across_hosts) {
    kind.allocate = [group = site.group](int64_t numel, const at::TensorOptions& of) {
      return group->getBackend(of.device().type())->allocateTensor(numel, of);
    };
  }
  return {BucketMessage(members, variables, site.device, std::move(kind)), std::move(reduction),
          index};
}

void PlannedBucket::reset() {
  pending = static_cast<int64_t>(message.slots().size());
  launched = false;
  producers.clear();
}

/// Makes the current stream wait for the streams that produced the gradients.
void PlannedBucket::join_producers() const {
  if (producers.empty()) return;  // on the CPU
  const c10::Stream current = current_stream(message.device());
  for (const c10::Stream& producer : producers) {
    if (producer == current) continue;
    // Recorded now, after every gradient that was enqueued on the producer so far.
    c10::Event event(message.device().type());
    event.record(producer);
    event.block(current);
  }
  for (const BucketMessage::Slot& slot : message.slots())
    keep_for_current_stream(slot.variable.grad());
}

/// Gradients, and a buffer from a hook, belong to the streams that allocated them. The stream that
/// ends backward reads and writes them. In a recorded backward, the allocating streams are unknown.
void PlannedBucket::keep_gradients() const {
  if (message.device().is_cpu()) return;
  const c10::Stream current = current_stream(message.device());
  if (producers == std::vector<c10::Stream>{current}) return;
  keep_for_current_stream(message.tensor());
  keep_for_current_stream(message.gradients_buffer());
  for (const BucketMessage::Slot& slot : message.slots()) {
    keep_for_current_stream(slot.variable.grad());
    keep_for_current_stream(slot.own);
  }
}

void PlannedBucket::launch(const BackwardPass& pass, ReducerContext& context,
                           const std::function<void()>& packed) {
  RECORD_USER_SCOPE("apex::reducer::launch_bucket");
  const c10::OptionalDeviceGuard on_device(message.device());
  join_producers();
  message.pack(pass.used, pass.start.kept, context.averaging(traits, message.dtype()).before);
  // A failed backward may free the buffer while this stream, which need not be the one that
  // allocated it, writes to it.
  keep_for_current_stream(message.tensor());
  keep_for_current_stream(message.gradients_buffer());
  if (packed) packed();
  context.statistics.add(&ReducerStatistics::gradients_copied, message.copied());
  if (traits.shares_memory) context.statistics.add(&ReducerStatistics::reduced_in_shared_memory);
  if (traits.across_hosts) context.statistics.add(&ReducerStatistics::reduced_by_host);
  launched = true;  // not before: if packing throws, zeros must be sent
  reduction->start(message, message.tensor(), name(context));
}

void PlannedBucket::launch_absent(bool poison, const ReducerContext& context,
                                  const std::function<void(const at::Tensor& tail)>& write_report) {
  launched = true;
  const c10::OptionalDeviceGuard on_device(message.device());
  // The last backward may still use the buffer, on a stream for which this one does not wait.
  if (unpacked_on) producers.push_back(*unpacked_on);
  join_producers();
  message.blank(poison);
  if (message.has_tail()) write_report(message.tail_of(message.tensor()));
  keep_for_current_stream(message.tensor());
  // The name must be the same as on ranks that send gradients: see Note [Ranks in different
  // collectives].
  reduction->start(message, message.tensor(), name(context));
}

void PlannedBucket::let_next_pass(const ReducerContext& context) {
  if (reduction->holds_back_next()) reduction->wait(name(context), {});
}

void PlannedBucket::wait(const std::function<void()>& meanwhile, const ReducerContext& context) {
  const c10::OptionalDeviceGuard on_device(message.device());
  reduction->wait(name(context), meanwhile);
}

void PlannedBucket::hand_out(const BackwardPass& pass, const ReducerContext& context) {
  const c10::OptionalDeviceGuard on_device(message.device());
  if (!message.device().is_cpu()) unpacked_on = current_stream(message.device());
  reduction->deliver(message);
  keep_gradients();
  message.unpack(context.averaging(traits, message.dtype()).after, pass.used_by_any);
}

std::string PlannedBucket::describe(const ReducerContext& context) const {
  const auto& slots = message.slots();
  std::string text = reduction->describe() + std::to_string(index) + " (parameter '" +
                     context.parameters[slots.front().parameter].name + "'";
  if (slots.size() > 1) {
    text += " to '" + context.parameters[slots.back().parameter].name + "', " +
            std::to_string(slots.size()) + " parameters";
  }
  return text + ", " + std::to_string(message.numel()) + " elements)";
}

/// The name for errors. Empty with one rank, because nothing is sent.
std::string PlannedBucket::name(const ReducerContext& context) const {
  return traits.has_peers || traits.runs_user_code ? describe(context) + of_backward(context) : "";
}

std::string of_backward(const ReducerContext& context) {
  return ", of backward number " + std::to_string(context.backward_number);
}

}  // namespace apex::parallel::detail
