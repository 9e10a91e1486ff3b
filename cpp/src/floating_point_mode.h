// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace apex::parallel {

/// RAII guard: round to nearest and keep subnormal numbers, whatever mode the calling thread is in
/// (torch.set_flush_denormal(True)), so that a sum has the same bits on whichever rank computes it.
/// Does nothing on processors other than x86-64.
class DefaultFloatingPointMode {
 public:
  DefaultFloatingPointMode() noexcept { set(mode_ & ~kMode); }
  DefaultFloatingPointMode(const DefaultFloatingPointMode&) = delete;
  DefaultFloatingPointMode& operator=(const DefaultFloatingPointMode&) = delete;
  ~DefaultFloatingPointMode() { set(mode_); }

 private:
  /// Bits of MXCSR: flush to zero (15), rounding (13 and 14), denormals are zeros (6).
  static constexpr unsigned kMode = 0xe040;

  /// The compiler does not move loads and stores across the barriers, and with them the arithmetic.
  static void set([[maybe_unused]] unsigned mode) noexcept {
#if defined(__x86_64__)
    __asm__ volatile("" : : : "memory");
    _mm_setcsr(mode);
    __asm__ volatile("" : : : "memory");
#endif
  }

#if defined(__x86_64__)
  const unsigned mode_ = _mm_getcsr();
#else
  const unsigned mode_ = 0;
#endif
};

}  // namespace apex::parallel
