// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A plan: which gradients travel together, in which order, and how each bucket is reduced.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include <apex/parallel/bucket_assignment.h>

#include "reducer/averaging.h"
#include "reducer/context.h"

namespace apex::parallel::detail {

/// Where a parameter stands in a plan, and what it was when the plan was agreed on.
struct Place {
  int64_t bucket = -1;     ///< index into the plan's entries, -1: in none
  size_t slot = 0;         ///< its place in that bucket
  int32_t expected = 1;    ///< times it fires per backward, as this rank has recorded
  bool sparse = false;     ///< its gradient has sparse layout
  int64_t sparse_dim = 0;  ///< and over how many of its dimensions
  bool in_parts = false;   ///< its gradient consists of several tensors
  bool trainable = false;  ///< on every rank
};

/// A bucket, and its state in one backward.
struct PlannedBucket {
  BucketMessage message;
  std::unique_ptr<Reduction> reduction;
  ReductionTraits traits;
  int64_t members = 0;  ///< parameters that have to fire before it is launched
  int64_t pending = 0;  ///< of these, how many have not
  bool launched = false;
  bool completed = false;                  ///< awaited and unpacked, and its callback was called
  std::vector<c10::Stream> producers;      ///< where its gradients were produced
  std::optional<c10::Stream> unpacked_on;  ///< in the last backward that was complete
  at::Tensor absent;  ///< what was sent instead of the message, see Note [Carried through]
  bool user_code_failed = false;  ///< a communication hook threw

  PlannedBucket(BucketMessage of, std::unique_ptr<Reduction> by)
      : message(std::move(of)), reduction(std::move(by)), traits(reduction->traits()) {}

  Averaging averaging(const ReducerContext& context) const {
    return averaging_of(context.options, traits, message.dtype(), context.divisor,
                        context.members.size, context.total_weight);
  }
  /// What travels: the message, or what was sent instead.
  const at::Tensor& sent() const { return absent.defined() ? absent : message.tensor(); }
  /// Ready for the next backward.
  void reset();
};

struct Plan {
  std::vector<Place> places;  ///< by parameter
  BucketPlan buckets;
  std::vector<PlannedBucket> entries;  ///< by bucket
  bool carries_report = false;         ///< behind the gradients of the last bucket
  bool watches_unplanned = false;      ///< parameters outside the plan may get a gradient
  bool preset = false;                 ///< given by the user: left as it is
  bool ordered = false;                ///< as the next forward needs its buckets
  int64_t number = 0;                  ///< of the reducer's plans, counted as they are built from 1
  int64_t backwards = 0;               ///< with this plan
  bool holds_gradients = false;        ///< its messages are those of the last backward
  int64_t unused_for = 0;              ///< so many backwards with other plans
  int64_t kinds = 0;                   ///< of the parameters, see ParameterTable

  /// Buckets ahead of the report.
  size_t plain_buckets() const { return entries.size() - (carries_report ? 1 : 0); }
  /// Whether collectives follow those that launch buckets.
  bool has_later_messages() const;
  /// See BucketMessage::move_misplaced().
  void move_misplaced_gradients();
  void reset();
};

/// Makes the entries of `plan` from its buckets and places.
void build_entries(Plan& plan, ReducerContext& context);

/// Buckets for gradients that are in no entry, which are reduced at once, without hook.
std::vector<PlannedBucket> build_late_round(const std::vector<int64_t>& parameters,
                                            const std::vector<Place>& places,
                                            ReducerContext& context);

/// For assign_buckets().
std::vector<ParameterInfo> parameter_infos(const ReducerContext& context,
                                           const std::vector<Place>& places);

/// "all-reduce of bucket 1 (parameter 'a' to 'b', 2 parameters, 30 elements), of backward number
/// 7".
std::string describe_bucket(const PlannedBucket& entry, size_t index,
                            const ReducerContext& context);

}  // namespace apex::parallel::detail
