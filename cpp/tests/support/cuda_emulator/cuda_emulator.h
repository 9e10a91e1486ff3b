// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>

/// Runs the project's CUDA kernels on the host, thread by thread, from the same source. Every
/// index, barrier and exchange between lanes is computed as on a GPU. Only the order of threads is
/// the emulator's, and memory is host memory.
///
/// A launch is complete when it returns. Its threads take turns: each runs until it must wait for
/// other threads. A launch returns an error if not all threads of a block reach a barrier, if they
/// reach different barriers, or if not all lanes of a warp take part in an exchange. Missing
/// barriers show as wrong results under one of the orders. Missing fences are not detected, nor are
/// races whose results are correct in every order. Shared memory starts as NaN (bytes of 0xff) in
/// every block.
///
/// Launches from several host threads are serialized.
namespace apex::testing::cuda {

/// Sets the order of turns. 0 (the default) is ascending and 1 descending, one block after the
/// other. Any other value is the seed of a shuffled order, with a few blocks at a time.
void set_order(uint64_t seed);

/// Number of launches since the program began.
int64_t launches();

/// Number of blocks of the last launch.
unsigned blocks();

/// Plans later launches for device `number` with this many resident threads. Default: 0 and 2048.
void set_device(int number, int resident_threads);

/// The fault of later launches; none by default.
enum class Fault { kNone, kLaunchesFail, kBlocksAreLost };
void set_fault(Fault fault);

/// Message of the last launch that returned an error.
std::string last_error();

}  // namespace apex::testing::cuda
