// SPDX-License-Identifier: BSD-3-Clause
#include <support/fake_capture.h>

#include <map>
#include <mutex>
#include <utility>

#include <support/fake_device.h>

namespace apex::testing::fake {
namespace {

/// The capture in progress.
struct State {
  std::mutex mutex;
  Graph* graph = nullptr;
  int64_t number = 0;  ///< number of the latest capture
  c10::StreamId origin = 0;
  std::map<c10::StreamId, RaceDetector::Clock> streams;  ///< captured streams and their clocks
  std::map<RaceDetector::Block, bool> inside, outside;  ///< memory used so far, and whether written
};

State& state() {
  static State instance;
  return instance;
}

using Lock = std::lock_guard<std::mutex>;

std::string named(c10::StreamId stream) { return "stream '" + detector().name(stream) + "'"; }

}  // namespace

void Graph::begin(const c10::Stream& stream) {
  State& s = state();
  const Lock lock(s.mutex);
  TORCH_CHECK(s.graph == nullptr, "a capture is in progress");
  s.graph = this;
  ++s.number;
  s.origin = stream.id();
  s.streams = {{stream.id(), detector().record(stream.id())}};
  s.inside.clear();
  s.outside.clear();
  if (stream.id() == 0) errors_.push_back("the default stream cannot be captured");
}

void Graph::end() {
  State& s = state();
  const Lock lock(s.mutex);
  TORCH_CHECK(s.graph == this, "no capture of this graph is in progress");
  const RaceDetector::Clock joined = detector().record(s.origin);
  for (const auto& [stream, clock] : s.streams) {
    for (size_t i = 0; i < clock.size(); ++i) {
      if (clock[i] > (i < joined.size() ? joined[i] : 0)) {
        errors_.push_back(named(stream) + " joined the capture and was not waited for");
        break;
      }
    }
  }
  s.graph = nullptr;
  s.streams.clear();
}

void Graph::replay() const {
  for (const auto& operation : operations_) operation();
}

int64_t Capture::of(c10::StreamId stream) {
  State& s = state();
  const Lock lock(s.mutex);
  return s.graph != nullptr && s.streams.count(stream) > 0 ? s.number : 0;
}

void Capture::wait(c10::StreamId stream, int64_t capture) {
  State& s = state();
  const Lock lock(s.mutex);
  const bool captured = s.graph != nullptr && s.streams.count(stream) > 0;
  if (s.graph != nullptr && capture == s.number) {
    if (stream == 0) s.graph->errors_.push_back("the default stream joins the capture");
    s.streams.emplace(stream, RaceDetector::Clock());
  } else if (captured) {
    s.graph->errors_.push_back(named(stream) + " waits for an event from outside of the capture");
  } else if (capture != 0) {
    detector().fail(named(stream) + " waits for an event of a capture that has ended");
  }
}

void Capture::host(const std::string& what, int64_t capture) {
  State& s = state();
  const Lock lock(s.mutex);
  if (s.graph != nullptr && capture == s.number) {
    s.graph->errors_.push_back("the host cannot know: " + what);
  } else if (capture != 0) {
    detector().fail("the host cannot know of a capture that has ended: " + what);
  }
}

void Capture::operate(c10::StreamId stream, const std::string& what,
                      const std::vector<RaceDetector::Access>& accesses,
                      std::function<void()> again) {
  State& s = state();
  const Lock lock(s.mutex);
  if (s.graph == nullptr) return;
  const auto found = s.streams.find(stream);
  const bool captured = found != s.streams.end();
  auto& here = captured ? s.inside : s.outside;
  const auto& there = captured ? s.outside : s.inside;
  for (const RaceDetector::Access& access : accesses) {
    const auto other = there.find(access.block);
    if (other != there.end() && (access.writes || other->second)) {
      s.graph->errors_.push_back(what + " on " + named(stream) +
                                 " uses memory on the other side of the capture");
    }
    here[access.block] = here[access.block] || access.writes;
  }
  if (captured) {
    found->second = detector().record(stream);
    s.graph->operations_.push_back(std::move(again));
  } else if (stream == 0) {
    s.graph->errors_.push_back(what + " on the default stream during a capture");
  }
}

}  // namespace apex::testing::fake
