#pragma once

#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <tuple>

#include "batch_norm_cpu.h"

/// Loads and stores of a pair of vectors in the type that elements are computed in. Compiled once
/// per instruction set: everything here lives in the namespace APEX_CPU_VARIANT.

namespace apex::kernels {
inline namespace APEX_CPU_VARIANT {

template <typename Acc>
using Vec = at::vec::Vectorized<Acc>;

inline auto widen(const Vec<at::BFloat16>& v) { return at::vec::convert_bfloat16_float(v); }
inline auto widen(const Vec<at::Half>& v) { return at::vec::convert_half_float(v); }

template <typename T>
inline Vec<T> narrow(const Vec<float>& a, const Vec<float>& b) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    return at::vec::convert_float_bfloat16(a, b);
  } else {
    return at::vec::convert_float_half(a, b);
  }
}

template <typename T>
struct Pack {
  using Acc = typename ElementwiseType<T>::type;
  static constexpr int64_t kHalf = Vec<Acc>::size();
  static constexpr int64_t kWidth = 2 * kHalf;

  Vec<Acc> a;
  Vec<Acc> b;

  static APEX_HOST_DEVICE Pack fill(Acc value) { return {Vec<Acc>(value), Vec<Acc>(value)}; }

  static APEX_HOST_DEVICE Pack load(const T* p) {
    if constexpr (std::is_same_v<T, Acc>) {
      return {Vec<Acc>::loadu(p), Vec<Acc>::loadu(p + kHalf)};
    } else {
      auto [a, b] = widen(Vec<T>::loadu(p));
      return {a, b};
    }
  }

  /// The first n < kWidth elements, and zeros.
  static APEX_HOST_DEVICE Pack load(const T* p, int64_t n) {
    if constexpr (std::is_same_v<T, Acc>) {
      const int64_t first = n < kHalf ? n : kHalf;
      const Vec<Acc> zero(Acc(0));
      return {Vec<Acc>::set(zero, Vec<Acc>::loadu(p, first), first),
              n > kHalf ? Vec<Acc>::set(zero, Vec<Acc>::loadu(p + kHalf, n - kHalf), n - kHalf)
                        : zero};
    } else {
      auto [a, b] = widen(Vec<T>::set(Vec<T>(T(0)), Vec<T>::loadu(p, n), n));
      return {a, b};
    }
  }

  /// Coefficients of kWidth channels, already in the elements' type of computation.
  static APEX_HOST_DEVICE Pack load_acc(const Acc* p) {
    return {Vec<Acc>::loadu(p), Vec<Acc>::loadu(p + kHalf)};
  }
  static APEX_HOST_DEVICE Pack load_acc(const Acc* p, int64_t n) {
    const int64_t first = n < kHalf ? n : kHalf;
    return {Vec<Acc>::loadu(p, first),
            n > kHalf ? Vec<Acc>::loadu(p + kHalf, n - kHalf) : Vec<Acc>(Acc(0))};
  }

  APEX_HOST_DEVICE void store(T* p) const {
    if constexpr (std::is_same_v<T, Acc>) {
      a.store(p);
      b.store(p + kHalf);
    } else {
      narrow<T>(a, b).store(p);
    }
  }

  APEX_HOST_DEVICE void store(T* p, int64_t n) const {
    if constexpr (std::is_same_v<T, Acc>) {
      a.store(p, static_cast<int>(n < kHalf ? n : kHalf));
      if (n > kHalf) {
        b.store(p + kHalf, static_cast<int>(n - kHalf));
      }
    } else {
      narrow<T>(a, b).store(p, static_cast<int>(n));
    }
  }

  APEX_HOST_DEVICE void store_acc(Acc* p) const {
    a.store(p);
    b.store(p + kHalf);
  }

  /// 1 in the last n lanes, 0 before them.
  static inline Pack last_lanes(int64_t n) {
    Acc lanes[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) {
      lanes[i] = i < kWidth - n ? Acc(0) : Acc(1);
    }
    return load_acc(lanes);
  }

  /// Elements from the n-th on are replaced by those of `other`.
  APEX_HOST_DEVICE Pack keep_first(int64_t n, const Pack& other) const {
    const int64_t first = n < kHalf ? n : kHalf;
    return {Vec<Acc>::set(other.a, a, first),
            n > kHalf ? Vec<Acc>::set(other.b, b, n - kHalf) : other.b};
  }

  APEX_HOST_DEVICE double sum() const {
    Acc lanes[kWidth];
    store_acc(lanes);
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

/// ReLU that lets NaN through, like torch's.
template <typename T>
inline Pack<T> relu(const Pack<T>& x) {
  const Vec<typename Pack<T>::Acc> zero(0);
  return {at::vec::maximum(x.a, zero), at::vec::maximum(x.b, zero)};
}

/// `gradient` where the value is not <= 0, else 0.
template <typename T>
inline Pack<T> relu_gradient(const Pack<T>& gradient, const Pack<T>& value) {
  using V = Vec<typename Pack<T>::Acc>;
  const V zero(0);
  return {V::blendv(gradient.a, zero, value.a <= zero),
          V::blendv(gradient.b, zero, value.b <= zero)};
}

}  // namespace APEX_CPU_VARIANT
}  // namespace apex::kernels
