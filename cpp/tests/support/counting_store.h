// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace apex::testing {

/// A store that counts this process's calls.
template <typename Base>
class Counting final : public Base {
 public:
  using Base::Base;
  int64_t requests() const { return requests_; }

  using Base::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++requests_;
    Base::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++requests_;
    return Base::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++requests_;
    return Base::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++requests_;
    return Base::check(keys);
  }
  void wait(const std::vector<std::string>& keys) override {
    ++requests_;
    Base::wait(keys);
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    ++requests_;
    Base::wait(keys, timeout);
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    ++requests_;
    Base::append(key, value);
  }

 private:
  std::atomic<int64_t> requests_{0};
};

using CountingStore = Counting<c10d::HashStore>;

}  // namespace apex::testing
