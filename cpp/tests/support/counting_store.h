// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace apex::testing {

/// A store in this process that counts what it is asked for.
class CountingStore final : public c10d::HashStore {
 public:
  int64_t requests() const { return requests_; }

  using c10d::HashStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++requests_;
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++requests_;
    return HashStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++requests_;
    return HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++requests_;
    return HashStore::check(keys);
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    ++requests_;
    HashStore::append(key, value);
  }

 private:
  std::atomic<int64_t> requests_{0};
};

}  // namespace apex::testing
