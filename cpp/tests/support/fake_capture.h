// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <support/race_detector.h>

/// Graphs of the fake device, by the rules of CUDA's stream capture ("CUDA Graphs" in the CUDA C++
/// Programming Guide, "Creating a Graph Using Stream Capture"): between begin() and end() what a
/// stream is asked for is put into a graph, and so is what other streams are asked for once they
/// have waited for an event of it. What CUDA refuses then is reported:
///   - a host that waits, or asks whether something is over,
///   - the default stream, joined or used,
///   - a captured stream that waits for an event from outside of the capture, or another one that
///     waits for an event of a capture that has ended,
///   - a stream that joined and is not waited for when the capture ends,
/// and one thing that CUDA does not notice: work outside of the graph on memory that the graph
/// uses. Unlike on a GPU, what is captured is computed while it is captured, too. Streams and
/// memory that only the graph uses stay its own, as in a memory pool of a graph.
namespace apex::testing::fake {

class Graph {
 public:
  /// One capture at a time.
  void begin(const c10::Stream& stream);
  void end();

  /// Computes what was captured again, in the same memory. Not told to the detector.
  void replay() const;

  /// What was reported while it was captured.
  const std::vector<std::string>& errors() const { return errors_; }
  size_t size() const { return operations_.size(); }

 private:
  friend class Capture;
  std::vector<std::function<void()>> operations_;
  std::vector<std::string> errors_;
};

/// What the device tells the capture in progress, if there is one. Thread safe.
class Capture {
 public:
  /// The capture that the stream takes part in, or 0.
  static int64_t of(c10::StreamId stream);
  /// `stream` waits for what was recorded in `capture` (0: in none).
  static void wait(c10::StreamId stream, int64_t capture);
  /// The host waits for, or asks about, a stream or an event of `capture`.
  static void host(const std::string& what, int64_t capture);
  /// An operation was put into `stream`; `again` computes it, and is kept if it is captured.
  static void operate(c10::StreamId stream, const std::string& what,
                      const std::vector<RaceDetector::Access>& accesses,
                      std::function<void()> again);
};

}  // namespace apex::testing::fake
