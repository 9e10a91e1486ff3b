// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <string>

namespace apex::parallel::detail {

/// A file that appears under its name when it is complete and on the disk, or never. A symbolic
/// link stays one, and what it leads to is replaced; an older file's permissions stay. What is no
/// file, a device for one, is refused. Functions throw apex::Error with the system's reason.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  /// Without commit(): deletes what was written.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size);
  void commit();

 private:
  std::string path_;  ///< to where symbolic links lead
  std::string temporary_;
  int file_ = -1;
};

}  // namespace apex::parallel::detail
