// SPDX-License-Identifier: BSD-3-Clause
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstddef>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/collectives.h"
#include "step/step_times.h"
#include "watch/watcher.h"

// What a step pays for being watched while no rank is late: by collective, that this rank's calls
// are known and that a wait is timed; by gradient, that the clock is read for straggler_report().
// (A wait that takes long costs more, while the rank has nothing else to do.)

namespace {

using apex::parallel::begin_call;
using apex::parallel::wait_collective;

class SilentBackend final : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "silent"; }
};

/// Rank 0 of two. Without a store nothing is watched.
c10::intrusive_ptr<c10d::ProcessGroup> make_group(bool with_store) {
  auto group = with_store ? c10::make_intrusive<c10d::ProcessGroup>(
                                c10::make_intrusive<c10d::HashStore>(), 0, 2)
                          : c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<SilentBackend>(0, 2)));
  group->setGroupName("benchmark");
  return group;
}

class Done final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

/// Argument: 1 if it is watched.
void CallAndWait(benchmark::State& state) {
  const auto group = make_group(state.range(0) != 0);
  const auto work = c10::make_intrusive<Done>();
  const std::string what = "all-reduce of bucket 3 (parameter 'layers.7.weight', 262144 elements)";
  for (auto _ : state) {
    begin_call(*group, what);
    wait_collective(work, what, *group);
  }
}
BENCHMARK(CallAndWait)->Arg(0)->Arg(1);

void GradientReady(benchmark::State& state) {
  apex::parallel::detail::StepClock clock;
  clock.backward_began(std::chrono::steady_clock::now(), {});
  size_t parameter = 0;
  for (auto _ : state) {
    clock.gradient_ready(parameter++, std::chrono::steady_clock::now(),
                         std::chrono::nanoseconds(0));
  }
}
BENCHMARK(GradientReady);

}  // namespace
