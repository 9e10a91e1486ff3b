// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/step_facts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace apex::parallel {

namespace {

constexpr int kLevels = 8;

// A fact of which only "somebody" matters has one bit, a question has one bit per answer.
enum Bit : int {
  kRebuild,
  kFailed,
  kLeft,
  kKept,
  kSkips,
  kQuestions,               // from here on: no, yes, no, yes, ...
  kMoved = kQuestions + 6,  // from here on: one of kLevels, see level_of()
  kEnd = kMoved + kLevels,
};
static_assert(kEnd == StepFacts::kCount);

constexpr uint32_t bit(int index) { return uint32_t{1} << index; }

struct Question {
  bool StepFacts::* answer;
  const char* yes;  ///< what a rank has done that answers yes
};

const Question kAsked[] = {
    {&StepFacts::idle_step, "stepped an optimizer twice without a backward between"},
    {&StepFacts::updated, "updated the parameters since the last synchronized backward"},
    {&StepFacts::updated_locally,
     "updated the parameters after a backward without synchronization"},
};

/// In steps of half a power of two, so that a step too many changes it, and what processors of two
/// kinds round differently does not, or only at a limit; modulo kLevels.
int level_of(double moved) {
  int exponent = 0;
  const double fraction = std::frexp(moved, &exponent);  // in [0.5, 1)
  const int level = 2 * exponent + (fraction >= 0.70710678118654752 ? 1 : 0);
  return static_cast<int>(static_cast<unsigned>(level) % kLevels);
}

bool tells_moved(const StepFacts& facts) { return facts.moved > 0 && std::isfinite(facts.moved); }

/// Less than half a step: the parameters of ranks that are apart by that are not.
constexpr double kSameDistance = 1.2;

double shortest_of(const std::vector<StepDetails>& ranks) {
  double shortest = 0;
  for (const StepDetails& details : ranks) {
    if (tells_moved(details.facts) && (shortest == 0 || details.facts.moved < shortest))
      shortest = details.facts.moved;
  }
  return shortest;
}

bool moved_further(const StepDetails& details, double shortest) {
  return tells_moved(details.facts) && details.facts.moved > kSameDistance * shortest;
}

/// "rank 0, rank 2": those for which `holds` is true.
template <typename Predicate>
std::string names(const std::vector<StepDetails>& ranks, Predicate&& holds) {
  std::string text;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (holds(ranks[r])) text += (text.empty() ? "rank " : ", rank ") + std::to_string(r);
  }
  return text;
}

}  // namespace

const char* const kReasonsToLeave[] = {"",
                                       "relearn()",
                                       "another communication hook",
                                       "load_bucket_plan()",
                                       "another use of OverlappedOptimizer",
                                       "parameters of another dtype, device or shape",
                                       "parameters that were frozen or unfrozen here, which with "
                                       "OverlappedOptimizer has to happen on every rank alike"};

uint32_t StepFacts::encode() const {
  uint32_t bits = (wants_rebuild ? bit(kRebuild) : 0) | (skips ? bit(kSkips) : 0);
  if (failed) return bits | bit(kFailed);
  bits |= bit(left_plan ? kLeft : kKept);
  if (left_plan || !compared) return bits;
  int question = kQuestions;
  for (const Question& asked : kAsked) {
    bits |= bit(question + (this->*asked.answer ? 1 : 0));
    question += 2;
  }
  if (tells_moved(*this)) bits |= bit(kMoved + level_of(moved));
  return bits;
}

bool SeenFacts::rebuild_wanted() const { return (bits_ & bit(kRebuild)) != 0; }
bool SeenFacts::failed() const { return (bits_ & bit(kFailed)) != 0; }
bool SeenFacts::skipped() const { return (bits_ & bit(kSkips)) != 0; }
bool SeenFacts::plan_left() const { return (bits_ & bit(kLeft)) != 0; }
bool SeenFacts::plan_kept() const { return (bits_ & bit(kKept)) != 0; }

bool SeenFacts::answers_differ() const {
  for (int question = kQuestions; question < kMoved; question += 2) {
    const uint32_t both = bit(question) | bit(question + 1);
    if ((bits_ & both) == both) return true;
  }
  const uint32_t levels = bits_ >> kMoved;
  return (levels & (levels - 1)) != 0;  // more than one
}

std::vector<int64_t> StepDetails::encode() const {
  int64_t flags = 0;
  const bool values[] = {facts.failed,  facts.left_plan,       facts.idle_step,
                         facts.updated, facts.updated_locally, hook_failed};
  int place = 0;
  for (const bool value : values) flags |= static_cast<int64_t>(value) << place++;
  int64_t moved = 0;
  std::memcpy(&moved, &facts.moved, sizeof(moved));
  return {flags, backward, reason, moved, digest};
}

StepDetails StepDetails::decode(const int64_t* fields) {
  StepDetails details;
  bool* const values[] = {&details.facts.failed,          &details.facts.left_plan,
                          &details.facts.idle_step,       &details.facts.updated,
                          &details.facts.updated_locally, &details.hook_failed};
  int place = 0;
  for (bool* const value : values) *value = ((fields[0] >> place++) & 1) != 0;
  details.backward = fields[1];
  details.reason = fields[2];
  std::memcpy(&details.facts.moved, &fields[3], sizeof(details.facts.moved));
  details.digest = fields[4];
  return details;
}

bool hooks_are_apart(const std::vector<StepDetails>& ranks) {
  const auto failed = [](const StepDetails& details) { return details.hook_failed; };
  return std::any_of(ranks.begin(), ranks.end(), failed) &&
         !std::all_of(ranks.begin(), ranks.end(), failed);
}

bool needs_digests(const std::vector<StepDetails>& ranks) {
  const StepFacts& first = ranks.front().facts;
  bool updates_differ = false;
  for (const StepDetails& details : ranks) {
    const StepFacts& facts = details.facts;
    if (facts.failed || facts.left_plan || facts.idle_step != first.idle_step) return false;
    updates_differ = updates_differ || facts.updated != first.updated ||
                     facts.updated_locally != first.updated_locally;
  }
  const double shortest = shortest_of(ranks);
  return updates_differ || std::any_of(ranks.begin(), ranks.end(), [&](const StepDetails& details) {
           return moved_further(details, shortest);
         });
}

std::string describe_difference(int rank, const std::vector<StepDetails>& ranks) {
  const std::string mine = "rank " + std::to_string(rank) + ": ";
  const std::string failed =
      names(ranks, [](const StepDetails& details) { return details.facts.failed; });
  if (!failed.empty()) {
    return mine + "backward number " + std::to_string(ranks[rank].backward) +
           " was ended by an exception on " + failed +
           ", so no gradient of this step is an average over all ranks. Look at the output of that "
           "rank; "
           "to go on, clear the gradients (zero_grad) on every rank and run the next step";
  }
  const auto has_left = [](const StepDetails& details) { return details.facts.left_plan; };
  const std::string left = names(ranks, has_left);
  if (!left.empty() && !std::all_of(ranks.begin(), ranks.end(), has_left)) {
    const auto first = std::find_if(ranks.begin(), ranks.end(), has_left);
    return mine + "before this backward " + left + " asked for a new bucket plan (" +
           kReasonsToLeave[first->reason] +
           "), but the other ranks did not, so no gradient of this step is an average over all "
           "ranks. Do it "
           "on every rank";
  }
  if (needs_digests(ranks)) {
    const int64_t first = ranks.front().digest;
    const bool same = std::all_of(ranks.begin(), ranks.end(), [&](const StepDetails& details) {
      return details.digest == first;
    });
    if (same) return {};
  }
  std::string told;
  for (const Question& asked : kAsked) {
    const auto yes = [&](const StepDetails& details) { return details.facts.*asked.answer; };
    const std::string who = names(ranks, yes);
    const std::string others =
        names(ranks, [&](const StepDetails& details) { return !yes(details); });
    if (who.empty() || others.empty()) continue;
    told += (told.empty() ? "" : "; ") + who + " " + asked.yes + ", " + others + " did not";
  }
  const double shortest = shortest_of(ranks);
  const auto further = [&](const StepDetails& one) { return moved_further(one, shortest); };
  const std::string far = names(ranks, further);
  if (!far.empty()) {
    told += (told.empty() ? "" : "; ") + far +
            " moved the parameters further since the last synchronized backward than " +
            names(ranks,
                  [&](const StepDetails& one) { return tells_moved(one.facts) && !further(one); }) +
            ", as by a step of an optimizer too many or another learning rate";
  }
  if (told.empty()) return {};
  return mine + "the ranks are out of step: " + told +
         ". Gradients of different steps are averaged then, and parameters may differ. Run the "
         "same backwards and optimizer steps on every rank (join() covers ranks with fewer "
         "batches), load weights (load_state_dict) on every rank or before the model is wrapped, "
         "and start again from a checkpoint; check_reduction=False (check_steps) switches this "
         "check off";
}

}  // namespace apex::parallel
