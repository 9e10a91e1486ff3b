// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>

#include "batch_norm_cpu.h"

/// A pack of two SIMD vectors in the compute type of the elements, with its loads and stores. This
/// file is compiled once per instruction set, in the namespace APEX_CPU_VARIANT.

namespace apex::kernels {
inline namespace APEX_CPU_VARIANT {

template <typename Acc>
using Vec = at::vec::Vectorized<Acc>;

// Note [Lanes]
// A bfloat16 is the upper half of a float32. Take a vector of bfloat16 as 32-bit words. A mask
// converts the elements at odd positions to float32, and a shift converts those at even positions.
// That is two instructions; a conversion that keeps the order takes five. The conversion back saves
// as much. So the first vector of a pack of bfloat16 holds the elements at even positions, and the
// second vector holds the others. For other types they hold the first half and the second half.
// Values per channel are permuted to this order beforehand (to_lanes). The words are little-endian,
// as on all platforms of libtorch.
//
// Note [NaN in bfloat16]
// Rounding to nearest adds to the bits of the value. A NaN whose lower half is (nearly) all ones
// would become another value. Such a NaN does not occur. A NaN from the data is a bfloat16, whose
// lower half is zero. A NaN that an operation makes has a single bit set, and operations propagate
// the NaNs of their operands. Coefficients are made canonical before use (canonical()). relu() uses
// a select, because the maximum of at::vec returns a NaN of all ones.

template <typename T>
inline constexpr bool kEvenAndOdd = std::is_same_v<T, at::BFloat16>;

inline void widen(const float* p, Vec<float>& a, Vec<float>& b) {
  a = Vec<float>::loadu(p);
  b = Vec<float>::loadu(p + Vec<float>::size());
}
inline void widen(const double* p, Vec<double>& a, Vec<double>& b) {
  a = Vec<double>::loadu(p);
  b = Vec<double>::loadu(p + Vec<double>::size());
}
inline void widen(const at::Half* p, Vec<float>& a, Vec<float>& b) {
  std::tie(a, b) = at::vec::convert_half_float(Vec<at::Half>::loadu(p));
}
inline void widen(const at::BFloat16* p, Vec<float>& a, Vec<float>& b) {
  using Words = Vec<int32_t>;
  const Words words = Words::loadu(p);
  a = at::vec::cast<float>(words << Words(16));
  b = at::vec::cast<float>(words & Words(static_cast<int32_t>(0xffff0000u)));
}

/// The value rounded to bfloat16 (to nearest, ties to even). Its bits are in the upper half of each
/// word.
inline Vec<int32_t> round_to_bfloat16(const Vec<float>& value) {
  using Words = Vec<int32_t>;
  const Words bits = at::vec::cast<int32_t>(value);
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i one = _mm512_set1_epi32(1);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i most = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(most, odd, most, one);
#else
  return bits + Words(0x7fff) + ((bits >> Words(16)) & Words(1));
#endif
}

/// How a pack is stored: normally, or with non-temporal stores (see Note [Past the caches]).
enum class Store { kCached, kStream };

template <Store kStore, typename T, typename Acc>
inline void store_vector(const Vec<Acc>& vector, T* p) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (kStore == Store::kStream) {
    __m512i bits;
    std::memcpy(&bits, &vector, sizeof(bits));
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bits);
    return;
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (kStore == Store::kStream) {
    __m256i bits;
    std::memcpy(&bits, &vector, sizeof(bits));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits);
    return;
  }
#endif
  vector.store(p);
}

template <Store kStore, typename Acc>
inline void narrow(const Vec<Acc>& a, const Vec<Acc>& b, Acc* p) {
  store_vector<kStore>(a, p);
  store_vector<kStore>(b, p + Vec<Acc>::size());
}
template <Store kStore>
inline void narrow(const Vec<float>& a, const Vec<float>& b, at::Half* p) {
  store_vector<kStore>(at::vec::convert_float_half(a, b), p);
}
template <Store kStore>
inline void narrow(const Vec<float>& a, const Vec<float>& b, at::BFloat16* p) {
  using Words = Vec<int32_t>;
#if defined(CPU_CAPABILITY_AVX512)
  // The results at even positions are the upper halves of a, those at odd positions of b.
  constexpr __mmask32 kOdd = 0xaaaaaaaa;
  // Named variables: without optimization the intrinsics are macros that cast their arguments.
  const __m512i first = round_to_bfloat16(a), odd = round_to_bfloat16(b);
  const __m512i even = _mm512_srli_epi32(first, 16);
  store_vector<kStore>(Words(_mm512_mask_blend_epi16(kOdd, even, odd)), p);
#else
  const Words even = (round_to_bfloat16(a) >> Words(16)) & Words(0xffff);
  const Words odd = round_to_bfloat16(b) & Words(static_cast<int32_t>(0xffff0000u));
  store_vector<kStore>(even | odd, p);
#endif
}

/// See Note [NaN in bfloat16].
template <typename Acc>
inline Acc canonical(Acc value) {
  return std::isnan(value) ? std::numeric_limits<Acc>::quiet_NaN() : value;
}

template <typename T>
struct Pack {
  using Acc = typename ElementwiseType<T>::type;
  static constexpr int64_t kHalf = Vec<Acc>::size();
  static constexpr int64_t kWidth = 2 * kHalf;

  Vec<Acc> a;
  Vec<Acc> b;

  static Pack fill(Acc value) {
    const Vec<Acc> all(canonical(value));
    return {all, all};
  }

  static Pack load(const T* p) {
    Pack pack;
    widen(p, pack.a, pack.b);
    return pack;
  }

  /// Loads n < kWidth elements and fills the rest with zeros.
  static Pack load(const T* p, int64_t n) {
    T values[kWidth] = {};
    std::memcpy(values, p, static_cast<size_t>(n) * sizeof(T));
    return load(values);
  }

  template <Store kStore = Store::kCached>
  void store(T* p) const {
    narrow<kStore>(a, b, p);
  }

  void store(T* p, int64_t n) const {
    T values[kWidth];
    store(values);
    std::memcpy(p, values, static_cast<size_t>(n) * sizeof(T));
  }

  /// Loads kWidth values that are in lane order.
  static Pack load_lanes(const Acc* p) { return {Vec<Acc>::loadu(p), Vec<Acc>::loadu(p + kHalf)}; }
  void store_lanes(Acc* p) const {
    a.store(p);
    b.store(p + kHalf);
  }

  /// Permutes kWidth values in place from element order to lane order; to_elements() reverses it.
  static void to_lanes(Acc* p) {
    if constexpr (kEvenAndOdd<T>) {
      const auto [even, odd] =
          at::vec::deinterleave2(Vec<Acc>::loadu(p), Vec<Acc>::loadu(p + kHalf));
      Pack{even, odd}.store_lanes(p);
    }
  }
  static void to_elements(Acc* p) {
    if constexpr (kEvenAndOdd<T>) {
      const auto [first, second] =
          at::vec::interleave2(Vec<Acc>::loadu(p), Vec<Acc>::loadu(p + kHalf));
      Pack{first, second}.store_lanes(p);
    }
  }

  /// 1 in the lanes of the first n elements, 0 in the others.
  static Pack first_elements(int64_t n) { return ones(0, n); }
  static Pack last_elements(int64_t n) { return ones(kWidth - n, kWidth); }

  double sum() const {
    Acc lanes[kWidth];
    store_lanes(lanes);
    constexpr int64_t kParts = kWidth < 8 ? kWidth : 8;  // independent sums, one vector of doubles
    double parts[kParts] = {};
    for (int64_t i = 0; i < kWidth; i += kParts) {
      for (int64_t j = 0; j < kParts; ++j) {
        parts[j] += static_cast<double>(lanes[i + j]);
      }
    }
    double total = 0;
    for (int64_t j = 0; j < kParts; ++j) {
      total += parts[j];
    }
    return total;
  }

 private:
  static Pack ones(int64_t begin, int64_t end) {
    Acc lanes[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) {
      lanes[i] = begin <= i && i < end ? Acc(1) : Acc(0);
    }
    to_lanes(lanes);
    return load_lanes(lanes);
  }
};

template <typename T>
inline Pack<T> operator+(const Pack<T>& x, const Pack<T>& y) {
  return {x.a + y.a, x.b + y.b};
}

template <typename T>
inline Pack<T> operator-(const Pack<T>& x, const Pack<T>& y) {
  return {x.a - y.a, x.b - y.b};
}

template <typename T>
inline Pack<T> operator*(const Pack<T>& x, const Pack<T>& y) {
  return {x.a * y.a, x.b * y.b};
}

template <typename T>
inline Pack<T> fma(const Pack<T>& x, const Pack<T>& y, const Pack<T>& z) {
  return {at::vec::fmadd(x.a, y.a, z.a), at::vec::fmadd(x.b, y.b, z.b)};
}

/// x in the lanes where `lanes` is 1, y where it is 0.
template <typename T>
inline Pack<T> select(const Pack<T>& lanes, const Pack<T>& x, const Pack<T>& y) {
  using V = Vec<typename Pack<T>::Acc>;
  const V zero(0);
  return {V::blendv(y.a, x.a, lanes.a > zero), V::blendv(y.b, x.b, lanes.b > zero)};
}

/// 0 where the value is <= 0, else `gradient`; a NaN in `value` keeps the gradient.
template <typename T>
inline Pack<T> relu_gradient(const Pack<T>& gradient, const Pack<T>& value) {
  using V = Vec<typename Pack<T>::Acc>;
  const V zero(0);
  return {V::blendv(gradient.a, zero, value.a <= zero),
          V::blendv(gradient.b, zero, value.b <= zero)};
}

/// ReLU that propagates NaN, like torch's.
template <typename T>
inline Pack<T> relu(const Pack<T>& x) {
  return relu_gradient(x, x);
}

}  // namespace APEX_CPU_VARIANT
}  // namespace apex::kernels
