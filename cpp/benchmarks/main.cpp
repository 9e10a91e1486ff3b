// SPDX-License-Identifier: BSD-3-Clause
#include <benchmark/benchmark.h>

#include <ATen/Parallel.h>

// One thread, to measure the work and not its distribution over threads.
int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
