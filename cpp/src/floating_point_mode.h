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
// Each thread of a processor has a floating-point mode: how it rounds, and whether it replaces
// subnormal numbers by zero, as torch.set_flush_denormal(True) and programs built with -ffast-math
// ask. Threads inherit the mode of the thread that starts them. A rank computes its own gradient in
// its own mode; all ranks receive the sum of these gradients. But what each rank computes from
// received values for itself, a sum of small messages, the division by the number of ranks, the
// merge of statistics, has to have the same bits on every rank. So all of that runs in the default
// mode: it rounds to nearest, and keeps subnormal numbers. A loop on several threads sets the mode
// on each of them.

/// While it lives, the calling thread computes in the default mode. Takes a few nanoseconds. Traps
/// and sticky flags stay as they are. Does nothing on processors other than x86-64 and AArch64.
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
  /// Of MXCSR: flush to zero (bit 15), rounding (13 and 14), denormals are zeros (6).
  static constexpr Register kMode = 0xe040;
  static Register read() noexcept { return _mm_getcsr(); }
  static void write(Register value) noexcept { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  /// Of FPCR: flush to zero (bit 24), rounding (22 and 23), flush float16 to zero (19), alternate
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

  /// For the compiler, arithmetic does not depend on the mode: but loads and stores do not move
  /// past this.
  static void keep_in_order() noexcept {
#if defined(__GNUC__)
    __asm__ volatile("" : : : "memory");
#endif
  }

  const Register saved_;
};

}  // namespace apex::parallel
