// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

namespace apex::testing {

/// A store that counts this process's calls.
class CountingStore final : public c10d::FileStore {
 public:
  using FileStore::FileStore;
  int64_t requests() const { return requests_; }

  using FileStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++requests_;
    FileStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++requests_;
    return FileStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++requests_;
    return FileStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++requests_;
    return FileStore::check(keys);
  }
  void wait(const std::vector<std::string>& keys) override {
    ++requests_;
    FileStore::wait(keys);
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    ++requests_;
    FileStore::wait(keys, timeout);
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    ++requests_;
    FileStore::append(key, value);
  }

 private:
  std::atomic<int64_t> requests_{0};
};

}  // namespace apex::testing
