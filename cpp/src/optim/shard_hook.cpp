// SPDX-License-Identifier: BSD-3-Clause
#include "optim/shard_hook.h"

#include <limits>
#include <unordered_map>
#include <utility>

#include <ATen/Functions.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "distributed/backends.h"
#include "reducer/averaging.h"
#include "reducer/built_in_hook.h"

namespace apex::parallel {

namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using detail::completed;

constexpr const char* kWhat = "reduce-scatter of gradients";

// Note [Reduce-scatter into shards]
//
// A rank's pieces of a bucket have any size, also none, since the shards are cut from all
// parameters. The bucket is permuted so that the elements of each rank are contiguous. On a device
// the backend sums: NCCL does so within nodes and switches before it sends. Gloo has no
// reduce-scatter that saves bytes, and an all-to-all sends as few; each rank then sums what it has
// received, in the order of the ranks, low precision in float32.
//
// The rest of the gradient becomes NaN. Left as it was, it would be this rank's own gradient, which
// a script may take for the average: a clipping by torch's function, for example, would use another
// norm on each rank. A NaN shows up in all that is computed from it, and if gradients are not
// cleared before the next backward, in all gradients.

class ShardHook final : public CommHook {
 public:
  ShardHook(GroupPtr group, std::vector<std::shared_ptr<const PiecesOfAll>> all)
      : group_(std::move(group)), all_(std::move(all)), world_(group_->getSize()) {}

  std::string name() const override { return "reduce-scatter for a ShardedOptimizer"; }

  bool may_chain() const override { return false; }

  bool has_finish(const GradientBucket& bucket) const override {
    return is_exchanged(bucket) && bucket.buffer.is_cpu();
  }

  FuturePtr run(GradientBucket& bucket) override {
    const at::NoGradGuard no_grad;
    Exchange exchange = layout_of(bucket);
    if (!is_exchanged(bucket)) return completed(bucket.buffer);
    if (bucket.buffer.is_cpu()) {
      FuturePtr future = exchange_on_cpu(exchange);
      exchanges_[bucket.index] = std::move(exchange);
      return detail::then(*future, bucket.buffer);
    }
    return side_stream_.run(bucket.buffer, [&] {
      sum_on_device(exchange);
      deliver(exchange, bucket.buffer);
      return completed(bucket.buffer);
    });
  }

  FuturePtr finish(GradientBucket& bucket, const at::Tensor&) override {
    const at::NoGradGuard no_grad;
    const auto found = exchanges_.find(bucket.index);
    if (found == exchanges_.end())
      throw Error("finish() was called for a bucket that was not sent");
    Exchange exchange = std::move(found->second);
    exchanges_.erase(found);
    const at::ScalarType dtype = bucket.buffer.scalar_type();
    const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
    exchange.own = at::sum(exchange.received.view({world_, numel_of(exchange, rank())}), {0},
                           /*keepdim=*/false, narrow ? at::kFloat : dtype);
    exchange.own.div_(world_);
    deliver(exchange, bucket.buffer);
    return completed(bucket.buffer);
  }

 private:
  struct Exchange {
    std::vector<std::vector<at::Tensor>> pieces;  ///< views of the buffer, by rank
    std::vector<int64_t> numels;                  ///< of them, by rank
    at::Tensor received;                          ///< on the CPU: [world, numels of this rank]
    at::Tensor own;                               ///< the average of this rank's pieces, flat
  };

  bool is_exchanged(const GradientBucket& bucket) const {
    return world_ > 1 && bucket.buffer.numel() > 0;
  }

  size_t rank() const { return static_cast<size_t>(group_->getRank()); }
  static int64_t numel_of(const Exchange& exchange, size_t rank) { return exchange.numels[rank]; }

  const std::vector<PieceOfRank>& pieces_of(const at::Tensor& parameter) const {
    for (const auto& pieces : all_) {
      const auto found = pieces->find(parameter.unsafeGetTensorImpl());
      if (found != pieces->end()) return found->second.pieces;
    }
    throw InvalidArgument("a parameter of shape " + c10::str(parameter.sizes()) +
                          " gets a gradient and is in no ShardedOptimizer with reduce_scatter, so "
                          "no rank would receive the average: add it to one");
  }

  Exchange layout_of(const GradientBucket& bucket) const {
    Exchange exchange;
    exchange.pieces.resize(static_cast<size_t>(world_));
    exchange.numels.resize(static_cast<size_t>(world_));
    for (size_t i = 0; i < bucket.gradients.size(); ++i) {
      const at::Tensor& gradient = bucket.gradients[i];
      // A complex element takes two elements of the buffer.
      const int64_t width = gradient.is_complex() ? 2 : 1;
      const int64_t at = gradient.storage_offset() * width - bucket.buffer.storage_offset();
      for (const PieceOfRank& piece : pieces_of(bucket.parameters[i])) {
        const auto rank = static_cast<size_t>(piece.rank);
        const int64_t numel = (piece.end - piece.begin) * width;
        if (numel == 0) continue;
        exchange.pieces[rank].push_back(bucket.buffer.narrow(0, at + piece.begin * width, numel));
        exchange.numels[rank] += numel;
      }
    }
    return exchange;
  }

  /// The pieces of all ranks in the order of the ranks.
  static at::Tensor packed(const Exchange& exchange) {
    std::vector<at::Tensor> all;
    for (const auto& of_rank : exchange.pieces)
      all.insert(all.end(), of_rank.begin(), of_rank.end());
    return at::cat(all);
  }

  FuturePtr exchange_on_cpu(Exchange& exchange) {
    const at::Tensor sent = packed(exchange);  // the Work holds it
    const int64_t own = numel_of(exchange, rank());
    exchange.received = at::empty({world_ * own}, sent.options());
    const int64_t size = sent.element_size();
    std::vector<int64_t> sent_bytes;
    for (const int64_t numel : exchange.numels) sent_bytes.push_back(numel * size);
    const std::vector<int64_t> received_bytes(static_cast<size_t>(world_), own * size);
    return issue_all_to_all(kWhat, *group_, exchange.received.view(at::kByte), sent.view(at::kByte),
                            received_bytes, sent_bytes)
        ->getFuture();
  }

  void sum_on_device(Exchange& exchange) {
    const at::Tensor sent = packed(exchange);
    exchange.own = at::empty({numel_of(exchange, rank())}, sent.options());
    const auto type = sent.device().type();
    const bool averages = detail::is_nccl(group_->getBackend(type)->getBackendName()) &&
                          detail::nccl_averages_well(sent.scalar_type(), world_);
    const auto op = averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    run_collective(kWhat, *group_, [&] {
      return issue_reduce_scatter(kWhat, *group_, exchange.own,
                                  sent.split_with_sizes(exchange.numels), op);
    });
    if (!averages) exchange.own.div_(world_);
  }

  void deliver(const Exchange& exchange, const at::Tensor& buffer) const {
    buffer.fill_(std::numeric_limits<double>::quiet_NaN());
    const std::vector<at::Tensor>& targets = exchange.pieces[rank()];
    std::vector<int64_t> sizes;
    for (const at::Tensor& target : targets) sizes.push_back(target.numel());
    if (!targets.empty()) at::_foreach_copy_(targets, exchange.own.split_with_sizes(sizes));
  }

  const GroupPtr group_;
  const std::vector<std::shared_ptr<const PiecesOfAll>> all_;
  const int64_t world_;
  std::unordered_map<int64_t, Exchange> exchanges_;  ///< by bucket, between run() and finish()
  detail::SideStream side_stream_;
};

}  // namespace

std::shared_ptr<CommHook> make_shard_hook(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                          std::vector<std::shared_ptr<const PiecesOfAll>> all) {
  return std::make_shared<ShardHook>(std::move(group), std::move(all));
}

}  // namespace apex::parallel
