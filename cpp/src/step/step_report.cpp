// SPDX-License-Identifier: BSD-3-Clause
#include "step/step_report.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

namespace apex::parallel {

namespace {

/// Number of words of a row before the bits per parameter: used, then trainable.
constexpr size_t kWords = sizeof(StepReport) / sizeof(int64_t);
static_assert(std::is_trivially_copyable_v<StepReport> && kWords == 9);  // no padding

size_t words_for(size_t bits) { return (bits + 63) / 64; }

bool bit_of(const int64_t* words, size_t bit) {
  return ((static_cast<uint64_t>(words[bit / 64]) >> (bit % 64)) & 1U) != 0;
}

template <typename Bits>
void write_bits(const Bits& bits, int64_t* words) {
  for (size_t begin = 0; begin < bits.size(); begin += 64) {
    uint64_t word = 0;
    const size_t end = std::min(bits.size(), begin + 64);
    for (size_t i = begin; i < end; ++i) word |= uint64_t{bits[i] != 0} << (i - begin);
    *words++ = static_cast<int64_t>(word);
  }
}

const char* const kReasons[] = {"", "rebuild_buckets()", "another communication hook",
                                "parameters of another dtype, device or shape",
                                "another wrapper averages some parameters"};

/// Allowed ratio of distances. Different processors round differently; an additional step moves
/// parameters by a larger ratio.
constexpr double kSameDistance = 1.2;

/// The ranks for whose report `holds` is true, as "rank 0, rank 2". `holds` may be a member.
template <typename Predicate>
std::string names_of(const std::vector<StepReport>& ranks, Predicate&& holds) {
  std::string text;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (std::invoke(holds, ranks[r]))
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(r);
  }
  return text;
}

template <typename Predicate>
bool any(const std::vector<StepReport>& ranks, Predicate&& holds) {
  return std::any_of(ranks.begin(), ranks.end(),
                     [&](const StepReport& one) { return std::invoke(holds, one); });
}

}  // namespace

size_t StepTable::row_size(size_t parameters) { return kWords + 2 * words_for(parameters); }

void StepTable::encode(const StepReport& report, const std::vector<uint8_t>& used,
                       const std::vector<bool>& trainable, int64_t* row) {
  std::memcpy(row, &report, sizeof(report));
  write_bits(used, row + kWords);
  write_bits(trainable, row + kWords + words_for(used.size()));
}

StepTable::StepTable(std::vector<int64_t> rows, size_t ranks, size_t parameters)
    : rows_(std::move(rows)), parameters_(parameters) {
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::memcpy(static_cast<void*>(&reports_.emplace_back()),
                rows_.data() + rank * row_size(parameters), sizeof(StepReport));
  }
}

const int64_t* StepTable::bits_of(size_t rank) const {
  return rows_.data() + rank * row_size(parameters_) + kWords;
}

bool StepTable::trainable(size_t rank, size_t parameter) const {
  return bit_of(bits_of(rank) + words_for(parameters_), parameter);
}

std::vector<uint8_t> StepTable::used_by_any() const {
  std::vector<int64_t> words(words_for(parameters_));
  for (size_t rank = 0; rank < reports_.size(); ++rank) {
    for (size_t w = 0; w < words.size(); ++w) words[w] |= bits_of(rank)[w];
  }
  std::vector<uint8_t> used(parameters_);
  for (size_t i = 0; i < parameters_; ++i) used[i] = bit_of(words.data(), i) ? 1 : 0;
  return used;
}

std::vector<bool> StepTable::trainable_set() const {
  size_t rank = 0;
  while (rank + 1 < reports_.size() && reports_[rank].without_data) ++rank;
  std::vector<bool> set(parameters_);
  for (size_t i = 0; i < parameters_; ++i) set[i] = trainable(rank, i);
  return set;
}

bool StepTable::any_failed() const { return any(reports_, &StepReport::failed); }

bool StepTable::skipped() const { return any(reports_, &StepReport::skips); }

bool StepTable::used_any(size_t rank) const {
  const int64_t* const used = bits_of(rank);
  return std::any_of(used, used + words_for(parameters_), [](int64_t word) { return word != 0; });
}

bool StepTable::has_digests() const {
  return !any(reports_, [](const StepReport& one) { return one.digest == 0; });
}

bool StepTable::same_digests() const {
  return !any(reports_, [&](const StepReport& one) { return one.digest != of(0).digest; });
}

double StepTable::total_weight() const {
  double total = 0;
  // A rank without a gradient may have no weight (NaN).
  for (const StepReport& one : reports_) total += std::isnan(one.weight) ? 0 : one.weight;
  return total;
}

int64_t StepTable::ranks_with_data() const {
  return std::count_if(reports_.begin(), reports_.end(),
                       [](const StepReport& one) { return !one.without_data; });
}

int64_t StepTable::last_with_data() const {
  const auto had = [](const StepReport& one) { return !one.followed; };
  if (std::all_of(reports_.begin(), reports_.end(), had)) return -1;
  return std::find_if(reports_.begin(), reports_.end(), had) - reports_.begin();
}

bool StepTable::all_left() const {
  return ranks_with_data() > 0 && !any(reports_, [](const StepReport& one) {
           return one.left == ReasonToLeave::kNone && !one.without_data;
         });
}

bool StepTable::same_settings() const {
  const auto has_data = [](const StepReport& one) { return !one.without_data; };
  const auto first = std::find_if(reports_.begin(), reports_.end(), has_data);
  return std::all_of(first, reports_.end(), [&](const StepReport& one) {
    return one.without_data || one.settings == first->settings;
  });
}

/// Describes ranks that have frozen parameters that others train; empty if there are none.
std::string StepTable::describe_sets(const Names& names) const {
  const std::vector<bool> first = trainable_set();
  for (size_t i = 0; i < parameters_; ++i) {
    std::string of_set[2];
    for (size_t rank = 0; rank < reports_.size(); ++rank) {
      if (reports_[rank].without_data) continue;
      std::string& text = of_set[trainable(rank, i) ? 1 : 0];
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
    if (of_set[first[i] ? 0 : 1].empty()) continue;
    return "parameter '" + names(i) + "' is frozen on " + of_set[0] + " and trainable on " +
           of_set[1] +
           ", so the gradients of this step are not averages over all ranks. Freeze and unfreeze "
           "(requires_grad_) the same parameters on every rank before the same backward; to "
           "continue, do so and clear the gradients";
  }
  return {};
}

/// Why a backward under join() is invalid; empty if it is valid.
std::string StepTable::describe_join() const {
  const std::string kept = names_of(reports_, &StepReport::keeps_gradients);
  if (!kept.empty()) {
    return kept +
           " added gradients to an average, which a rank without data cannot do: "
           "DistributedDataParallel.join() with gradients kept between synchronized backwards is "
           "not supported: clear gradients (zero_grad), or accumulate under no_sync()";
  }
  const bool ends = any(reports_, &StepReport::ends_early);
  const std::string without = names_of(reports_, &StepReport::without_data);
  if (!ends || without.empty() || ranks_with_data() == 0) return {};
  return without +
         " has run out of data, and join() was called with throw_on_early_termination=True. "
         "(Detected at least one rank that exhausted inputs.)";
}

/// Describes a rank without a valid weight; empty if there is none.
std::string StepTable::describe_weights() const {
  if (skipped()) return {};
  for (size_t rank = 0; rank < reports_.size(); ++rank) {
    const double weight = reports_[rank].weight;
    const bool is_missing = std::isnan(weight);
    if ((weight >= 0 && std::isfinite(weight)) || (is_missing && !used_any(rank))) continue;
    const std::string who = "rank " + std::to_string(rank);
    const std::string what = is_missing
                                 ? "ran a backward outside weight(), or passed NaN as its weight"
                                 : "passed the weight " + std::to_string(weight);
    return who + ' ' + what +
           ", so gradients could not be divided by the sum of the weights. Run each backward, "
           "including those in no_sync(), in weight() with a finite, non-negative weight; to "
           "continue, clear the gradients";
  }
  if (!std::isfinite(total_weight()))
    return "the sum of the weights of all ranks is not finite: pass smaller weights; to continue, "
           "clear the gradients";
  return {};
}

std::string StepTable::why_refused(const Names& names) const {
  const std::string failed = names_of(reports_, &StepReport::failed);
  if (!failed.empty()) {
    return "this backward was ended by an exception on " + failed +
           ", so the gradients of this step are not averages over all ranks. Check the output of "
           "that rank; to continue, clear the gradients (zero_grad) on every rank and run the next "
           "step";
  }
  if (std::string join = describe_join(); !join.empty()) return join;
  // Checked before the plan, because this message names the cause.
  const size_t words = words_for(parameters_);
  for (size_t rank = 1; rank < reports_.size(); ++rank) {
    if (std::equal(bits_of(rank) + words, bits_of(rank) + 2 * words, bits_of(0) + words)) continue;
    if (std::string apart = describe_sets(names); !apart.empty()) return apart;
    break;
  }
  if (std::string weights = describe_weights(); !weights.empty()) return weights;
  const auto has_left = [](const StepReport& one) { return one.left != ReasonToLeave::kNone; };
  const std::string left = names_of(reports_, has_left);
  if (left.empty() || all_left()) return {};
  const auto first = std::find_if(reports_.begin(), reports_.end(), has_left);
  return "before this backward " + left + " requested a new bucket plan (" +
         kReasons[static_cast<size_t>(first->left)] +
         "), but the other ranks did not, so the gradients of this step are not averages over all "
         "ranks. Make the same call on every rank; to continue, clear the gradients";
}

bool StepTable::all_stepped_locally() const {
  return std::all_of(reports_.begin(), reports_.end(), [](const StepReport& one) {
    return one.facts.compared && one.facts.stepped_locally;
  });
}

std::string StepTable::describe_difference() const {
  const StepFacts& first = of(0).facts;
  const auto alike = [&](const StepReport& one) { return one.facts.sample == first.sample; };
  const auto unknown = [](const StepReport& one) {
    return !one.facts.compared || one.facts.sample == 0;
  };
  if (any(reports_, unknown) || std::all_of(reports_.begin(), reports_.end(), alike)) return {};
  const bool local = any(reports_, [](const StepReport& one) { return one.facts.local; });
  double shortest = std::numeric_limits<double>::infinity();
  for (const StepReport& one : reports_) {
    if (one.facts.moved > 0) shortest = std::min(shortest, one.facts.moved);
  }
  // A write may leave the values as they are, and a step and a write of the program may cancel out.
  const auto moved = [](const StepReport& one) {
    return one.facts.written || one.facts.moved != 0 || one.facts.steps != 0;
  };
  const auto further = [&](const StepReport& one) {
    return one.facts.measured && one.facts.moved > kSameDistance * shortest &&
           std::isfinite(one.facts.moved);
  };
  const auto stepped = [&](const StepReport& one) { return one.facts.steps != first.steps; };
  const auto names = [&](auto&& holds, bool value) {
    return names_of(reports_, [&](const StepReport& one) { return holds(one) == value; });
  };
  const std::string since = " since construction or the last synchronized backward";
  std::string what;
  if (!local && any(reports_, moved) && !names(moved, false).empty()) {
    what = names(moved, true) + " updated the parameters" + since + ", " + names(moved, false) +
           " did not";
  } else if (any(reports_, stepped)) {
    const auto other = std::find_if(reports_.begin(), reports_.end(), stepped);
    what = names(stepped, true) + " made another number of optimizer steps" + since + " than " +
           names(stepped, false) + ": " + std::to_string(other->facts.steps) + ", not " +
           std::to_string(first.steps);
  } else if (!local && any(reports_, further)) {
    what = names(further, true) + " changed the parameters by more" + since + " than " +
           names(further, false) +
           ", for example by an additional optimizer step or another learning rate";
  } else {
    return {};
  }
  return "the ranks are out of step: " + what +
         ". Gradients of different steps were averaged, and parameters may differ. Run the same "
         "backwards, under no_sync() or not, and optimizer steps on every rank (join() covers "
         "ranks "
         "with fewer batches), load weights (load_state_dict) on every rank or before the model is "
         "wrapped, and restart from a checkpoint; check_reduction=False (in C++, check_steps) "
         "disables this check";
}

std::string StepTable::describe_non_finite(const Names& names) const {
  std::string text;
  size_t count = 0;
  for (size_t rank = 0; rank < reports_.size(); ++rank) {
    const int64_t parameter = reports_[rank].non_finite;
    if (parameter < 0 || count++ > 0) continue;
    text = "rank " + std::to_string(rank) +
           " contributed a gradient that is infinite or NaN for parameter '" +
           names(static_cast<size_t>(parameter)) + "'";
  }
  if (text.empty()) return text;
  return text + " (" + std::to_string(count) + " of " + std::to_string(reports_.size()) +
         " ranks have such gradients), so its average is not finite on any rank: check that rank's "
         "batch and loss, lower the learning rate, or scale the loss; do not step the optimizer";
}

}  // namespace apex::parallel
