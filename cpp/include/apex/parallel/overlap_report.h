// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <apex/export.h>

/// What communication of a backward was hidden behind computation, what was exposed, and when each
/// bucket was ready, sent and there. A leaf: it knows times, not the reducer; see
/// Reducer::record_overlap().

namespace apex::parallel {

/// Where times come from.
enum class OverlapClock {
  kHost,      ///< gradients are on the CPU: the host's clock
  kDevice,    ///< gradients are on a device: when its streams got there, by events
  kHostOnly,  ///< gradients are on a device without timed events, or on several: when the host
              ///< asked for things, which says little about when they happened
};

/// One bucket's way. Seconds since backward began; ready_s <= launched_s <= arrived_s.
struct BucketOverlap {
  std::vector<int64_t> parameters;  ///< indices into Reducer::parameters()
  std::vector<std::string> names;   ///< of these parameters
  int64_t bytes = 0;   ///< what this rank gave to the process group, or to the communication hook
  double ready_s = 0;  ///< its last gradient was computed; launched_s where this rank missed one
  double launched_s = 0;  ///< packed, and handed to the process group
  double arrived_s = 0;  ///< its sum was there: from launched_s on it was in flight, which includes
                         ///< waiting for the last rank to send its part
  double awaited_s = 0;  ///< somebody began to wait for it; may be before or after it arrived
  double exposed_s = 0;  ///< of the time in flight, what nothing hid; see OverlapReport::exposed_s
  bool shared_memory = false;  ///< summed in the memory of this host's ranks, which are all
  bool by_host = false;        ///< summed in the memory of each host's ranks, and then between the
                               ///< hosts; if neither, it went through the process group
};

/// One synchronized backward on one rank. Seconds.
struct OverlapReport {
  OverlapClock clock = OverlapClock::kHost;
  double began_s = 0;  ///< when backward began, by std::chrono::steady_clock, which the processes
                       ///< of a host share; on a device: when its stream got there
  double last_gradient_s = 0;  ///< from the begin of backward until its last gradient was computed
  double backward_s = 0;       ///< until gradients were complete; of one that was deferred
                               ///< (Reducer::set_deferred()), until it returned
  double communication_s = 0;  ///< time in which at least one bucket was in flight
  double exposed_s = 0;  ///< of it, what nothing hid: between last_gradient_s and backward_s, or,
                         ///< after a deferred backward, while somebody waited for a bucket
  double hidden_s = 0;   ///< the rest: gradients, or the next forward, were computed meanwhile
  double hidden_fraction = 1;          ///< hidden_s / communication_s; 1 if nothing was in flight
  std::vector<BucketOverlap> buckets;  ///< in launch order
};

/// Computes all but began_s and the times of the buckets, of which exposed_s is computed as well.
/// Pure.
///
/// @param last_gradient_s, backward_s  as in OverlapReport
/// @param buckets  with all but exposed_s
/// @throws InvalidArgument if a time is not finite, or out of order: last_gradient_s <= backward_s,
///         ready_s <= launched_s <= arrived_s.
/// Thread safe; does not block.
APEX_API OverlapReport summarize_overlap(double last_gradient_s, double backward_s,
                                         std::vector<BucketOverlap> buckets,
                                         OverlapClock clock = OverlapClock::kHost);

/// A table to read: two lines about the backward, and a row per bucket, in milliseconds and MiB.
/// Several lines, each ended. Thread safe; does not block.
APEX_API std::string to_string(const OverlapReport& report);

}  // namespace apex::parallel
