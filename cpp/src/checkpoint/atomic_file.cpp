// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

#include <apex/error.h>

namespace apex::parallel::detail {

namespace {

constexpr int kMostLinks = 40;  // as in Linux

[[noreturn]] void fail() { throw Error(std::generic_category().message(errno)); }

/// Syncs `file` to disk. File systems without fsync return EINVAL.
void wait_for_disk(int file) {
  while (::fsync(file) != 0) {
    if (errno == EINVAL) return;
    if (errno != EINTR) fail();
  }
}

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  // rename() would replace a link or a device itself. canonical() fails if the target does not
  // exist yet.
  std::error_code error;
  for (int links = 0; std::filesystem::is_symlink(path_, error); ++links) {
    if (links == kMostLinks) throw Error(std::generic_category().message(ELOOP));
    const std::filesystem::path target = std::filesystem::read_symlink(path_, error);
    if (error) throw Error(error.message());
    path_ = (std::filesystem::path(path_).parent_path() / target).string();
  }
  struct stat older{};
  const bool replaces = ::stat(path_.c_str(), &older) == 0;
  if (replaces && !S_ISREG(older.st_mode)) throw Error("it is not a regular file");
  // In the same folder, since rename() is atomic only within a file system.
  const std::filesystem::path whole(path_);
  std::string name = whole.filename().string();
  std::string end = "." + std::to_string(::getpid()) + ".part";
  if (1 + name.size() + end.size() > NAME_MAX) {  // truncated to NAME_MAX; the hash keeps it unique
    end.insert(0, "." + std::to_string(std::hash<std::string>()(name)));
    name.resize(std::min(name.size(), NAME_MAX - 1 - end.size()));
  }
  temporary_ = (whole.parent_path() / ("." + name + end)).string();
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) fail();
  // If fchmod() is not permitted, another user owns the file.
  if (replaces) static_cast<void>(!::fchmod(file_, older.st_mode & 0777));
}

AtomicFile::~AtomicFile() {
  if (file_ >= 0) ::close(file_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(file_, next, size);
    if (written < 0 && errno != EINTR) fail();
    if (written <= 0) continue;
    next += written;
    size -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  wait_for_disk(file_);
  if (::close(std::exchange(file_, -1)) != 0) fail();
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail();
  temporary_.clear();
  // Sync the new directory entry as well.
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  const int opened =
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (opened < 0) return;  // the folder may be writable but not readable
  ::fsync(opened);
  ::close(opened);
}

}  // namespace apex::parallel::detail
