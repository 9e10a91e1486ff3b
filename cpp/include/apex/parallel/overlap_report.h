// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <apex/export.h>

/// How much communication of a backward was hidden behind computation, how much was exposed, and
/// when each bucket was ready, launched and complete. Depends on times only, not on the reducer;
/// see Reducer::record_overlap().

namespace apex::parallel {

/// The clock behind the times of a report.
enum class OverlapClock {
  kHost,      ///< gradients are on the CPU: the host's clock
  kDevice,    ///< gradients are on a device: timed events on its streams
  kHostOnly,  ///< gradients are on a device without timed events, or on several: the times of the
              ///< host's calls, which say little about when the device executed them
};

/// The times of one bucket, in seconds since backward began; ready_s <= launched_s <= arrived_s.
struct BucketOverlap {
  std::vector<int64_t> parameters;  ///< indices into Reducer::parameters()
  std::vector<std::string> names;   ///< of these parameters
  int64_t bytes = 0;   ///< bytes that this rank gave to the process group or the communication hook
  double ready_s = 0;  ///< its last gradient was computed; launched_s if this rank missed one
  double launched_s = 0;  ///< packed, and handed to the process group
  double arrived_s = 0;   ///< its sum was complete; in flight from launched_s to here, which
                          ///< includes waiting for the last rank to send its part
  double awaited_s = 0;   ///< a wait for it began; may be before or after it arrived
  double exposed_s = 0;   ///< the part of its time in flight that was not hidden; see OverlapReport
  bool shared_memory = false;  ///< summed in shared memory, with all ranks on this host
  bool by_host = false;        ///< summed in each host's shared memory, then between hosts; if
                               ///< both are false, it went through the process group
};

/// One synchronized backward on one rank. Times are in seconds.
struct OverlapReport {
  OverlapClock clock = OverlapClock::kHost;
  double began_s = 0;  ///< when backward began, by std::chrono::steady_clock, which all processes
                       ///< of a host share; on a device, when its stream reached that point
  double last_gradient_s = 0;  ///< from the start of backward until its last gradient was computed
  double backward_s = 0;       ///< until gradients were complete; for a deferred backward
                               ///< (Reducer::set_deferred()), until it returned
  double communication_s = 0;  ///< time in which at least one bucket was in flight
  double exposed_s = 0;  ///< the part that was not hidden: between last_gradient_s and backward_s,
                         ///< or, after a deferred backward, while a wait for a bucket was in
                         ///< progress
  double hidden_s = 0;   ///< the rest, during which gradients or the next forward were computed
  double hidden_fraction = 1;          ///< hidden_s / communication_s; 1 if nothing was in flight
  std::vector<BucketOverlap> buckets;  ///< in launch order
};

/// Computes every field of OverlapReport except began_s, including each bucket's exposed_s. A pure
/// function: thread safe, does not block.
///
/// @param last_gradient_s, backward_s  as in OverlapReport
/// @param buckets  complete except for exposed_s
/// @throws InvalidArgument if a time is not finite, or out of order: last_gradient_s <= backward_s,
///         ready_s <= launched_s <= arrived_s.
APEX_API OverlapReport summarize_overlap(double last_gradient_s, double backward_s,
                                         std::vector<BucketOverlap> buckets,
                                         OverlapClock clock = OverlapClock::kHost);

/// A readable table: two lines about the backward and a row per bucket, in milliseconds and MiB.
/// Every line ends with a newline. Thread safe; does not block.
APEX_API std::string to_string(const OverlapReport& report);

}  // namespace apex::parallel
