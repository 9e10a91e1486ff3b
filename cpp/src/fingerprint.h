// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>

namespace apex {

/// FNV-1a, 64 bit (Fowler, Noll, Vo): tells apart what differs by mistake; not a defence.
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
