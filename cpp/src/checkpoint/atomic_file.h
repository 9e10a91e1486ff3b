// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <string>

namespace apex::parallel::detail {

/// Writes a file atomically: it appears under its name once it is complete and synced to disk, or
/// not at all. Follows a symbolic link and keeps an existing file's permissions. Refuses paths that
/// are not regular files, such as devices. Functions throw apex::Error with the system's reason.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  /// Without commit(), deletes the temporary file.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size);
  void commit();

 private:
  std::string path_;  ///< with symbolic links resolved
  std::string temporary_;
  int file_ = -1;
};

}  // namespace apex::parallel::detail
