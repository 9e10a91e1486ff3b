// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <support/race_detector.h>

/// Graphs of the fake device, with the rules of CUDA's stream capture ("CUDA Graphs" in the CUDA
/// C++ Programming Guide, "Creating a Graph Using Stream Capture"). Between begin() and end(),
/// operations on the stream are recorded into a graph, and so are operations on other streams after
/// they have waited for an event of the capture. Reported as errors, as in CUDA:
///   - a host that waits for or polls captured work,
///   - a default stream that joins or is used,
///   - a captured stream that waits for an event from outside the capture, or another stream that
///     waits for an event of a capture that has ended,
///   - a stream that joined and is not waited for when the capture ends.
/// Also reported, though CUDA does not detect it: work outside the graph on memory that the graph
/// uses. Unlike on a GPU, captured operations also run during capture. Streams and memory that only
/// the graph uses stay reserved for it, as in a graph's memory pool.
namespace apex::testing::fake {

class Graph {
 public:
  /// One capture at a time.
  void begin(const c10::Stream& stream);
  void end();

  /// Runs the captured operations again on the same memory, unseen by the detector.
  void replay() const;

  /// Errors found during capture.
  const std::vector<std::string>& errors() const { return errors_; }
  size_t size() const { return operations_.size(); }

 private:
  friend class Capture;
  std::vector<std::function<void()>> operations_;
  std::vector<std::string> errors_;
};

/// The device's hooks into the capture in progress, if any. Thread safe.
class Capture {
 public:
  /// The capture that the stream takes part in, or 0.
  static int64_t of(c10::StreamId stream);
  /// `stream` waits for an event that was recorded in `capture` (0: outside of captures).
  static void wait(c10::StreamId stream, int64_t capture);
  /// The host waits for or polls a stream or an event of `capture`.
  static void host(const std::string& what, int64_t capture);
  /// An operation was enqueued on `stream`. `again` recomputes it, and is kept if it is captured.
  static void operate(c10::StreamId stream, const std::string& what,
                      const std::vector<RaceDetector::Access>& accesses,
                      std::function<void()> again);
};

}  // namespace apex::testing::fake
