// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The floating-point mode of the calling thread.

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace apex::parallel {

// Note [Floating-point modes]
//
// Each thread has a floating-point mode. The mode selects the rounding, and whether subnormal
// numbers are flushed to zero: torch.set_flush_denormal(True) and programs built with -ffast-math
// turn this on. A thread inherits the mode of the thread that starts it. A rank computes its own
// gradient in its own mode, and all ranks receive the sum of these gradients. But each rank also
// computes results from received values itself: it sums small messages, divides by the number of
// ranks and merges statistics. These results must have the same bits on every rank. So these
// computations run in the default mode, which rounds to nearest and keeps subnormal numbers. A loop
// on several threads sets the mode on each thread.

/// RAII guard that puts the calling thread into the default floating-point mode. Takes a few
/// nanoseconds. Traps and sticky flags stay as they are. Does nothing on processors other than
/// x86-64 and AArch64.
///
///     const DefaultFloatingPointMode mode;
///     for (int64_t i = 0; i < numel; ++i) sum[i] += other[i];
class DefaultFloatingPointMode {
 public:
  DefaultFloatingPointMode() noexcept : saved_(read()) {
    if ((saved_ & kMode) != 0) write(saved_ & ~kMode);
    keep_in_order();
  }
  DefaultFloatingPointMode(const DefaultFloatingPointMode&) = delete;
  DefaultFloatingPointMode& operator=(const DefaultFloatingPointMode&) = delete;
  ~DefaultFloatingPointMode() {
    keep_in_order();
    if ((saved_ & kMode) != 0) write((read() & ~kMode) | (saved_ & kMode));
  }

 private:
#if defined(__x86_64__) || defined(_M_X64)
  using Register = uint32_t;
  /// Bits of MXCSR: flush to zero (15), rounding (13 and 14), denormals are zeros (6).
  static constexpr Register kMode = 0xe040;
  static Register read() noexcept { return _mm_getcsr(); }
  static void write(Register value) noexcept { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  /// Bits of FPCR: flush to zero (24), rounding (22 and 23), flush float16 to zero (19), alternate
  /// handling (1), flush inputs to zero (0).
  static constexpr Register kMode = 0x1c80003;
  static Register read() noexcept {
    Register value = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) noexcept { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
  using Register = uint32_t;
  static constexpr Register kMode = 0;
  static Register read() noexcept { return 0; }
  static void write(Register) noexcept {}
#endif

  /// A compiler barrier. The compiler does not know that arithmetic depends on the mode, but it
  /// does not move loads and stores across this.
  static void keep_in_order() noexcept {
#if defined(__GNUC__)
    __asm__ volatile("" : : : "memory");
#endif
  }

  const Register saved_;
};

}  // namespace apex::parallel
