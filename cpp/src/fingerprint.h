// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>

namespace apex {

/// 64-bit FNV-1a hash (Fowler, Noll, Vo). It detects accidental differences; it is not
/// cryptographic.
class Fingerprint {
 public:
  Fingerprint& add(const void* data, size_t bytes) {
    const auto* begin = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ begin[i]) * 1099511628211ULL;
    return *this;
  }
  int64_t value() const { return static_cast<int64_t>(hash_); }

 private:
  uint64_t hash_ = 14695981039346656037ULL;
};

}  // namespace apex
