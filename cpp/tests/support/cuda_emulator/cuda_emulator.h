// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>

/// Runs the project's CUDA kernels on the host, thread by thread, from the same source: every
/// index, barrier and exchange between lanes is the one that a GPU computes; only the order in
/// which threads run is the emulator's, and memory is the host's.
///
/// A launch is over when it returns. Its threads take turns: each runs until it has to wait for
/// others. Reported, as an error of the launch, are barriers that not all threads of a block reach,
/// or reach in different places, and exchanges that not all lanes of a warp take part in. Missing
/// barriers show as wrong results under one of the orders. Not noticed are missing fences, and
/// races that no order of turns gets wrong. Shared memory starts as NaN (bytes of 0xff) in every
/// block.
///
/// Launches of several host threads are run one after the other.
namespace apex::testing::cuda {

/// The order of turns: 0 ascending and 1 descending, one block after the other; anything else
/// shuffled, with that seed, and a few blocks at a time. 0 at first.
void set_order(uint64_t seed);

/// Launches since the program began.
int64_t launches();

/// Blocks of the last launch.
unsigned blocks();

/// Launches are planned for device `number` from now on, which runs so many threads at once. 0 and
/// 2048 at first.
void set_device(int number, int resident_threads);

/// What goes wrong with launches from now on; nothing at first.
enum class Fault { kNone, kLaunchesFail, kBlocksAreLost };
void set_fault(Fault fault);

/// What was wrong with the last launch that returned an error.
std::string last_error();

}  // namespace apex::testing::cuda
