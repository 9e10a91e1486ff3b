// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <utility>

#include <apex/error.h>

namespace apex::parallel {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

/// Closes `fd`, unless it is -1.
[[noreturn]] void throw_system_error(const std::string& what, int fd = -1) {
  const std::string why = std::strerror(errno);
  if (fd >= 0) ::close(fd);
  throw Error(what + ": " + why);
}

char* map(int fd, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw_system_error("shared memory could not be mapped (mmap)", fd);
  ::madvise(data, bytes, MADV_HUGEPAGE);  // not every system supports huge pages
  ::madvise(data, bytes, MADV_DONTDUMP);  // a core dump would allocate every page of the file
  return static_cast<char*>(data);
}

int make_file(size_t bytes) {
  // A larger file would end the process by SIGXFSZ.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes)
    throw Error("no shared memory: the limit on file sizes is " + std::to_string(limit.rlim_cur) +
                " bytes (ulimit -f)");
  const int fd = ::memfd_create("apex", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_system_error("no shared memory (memfd_create)");
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw_system_error("no shared memory (ftruncate)", fd);
  return fd;
}

/// Whether it is a file of `bytes` bytes that cannot shrink.
bool has_size(int fd, uint64_t bytes) {
  struct stat status{};
  const int seals = ::fcntl(fd, F_GET_SEALS);  // -1: another kind of file
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
         static_cast<uint64_t>(status.st_size) == bytes && seals >= 0 &&
         (seals & F_SEAL_SHRINK) != 0;
}

}  // namespace

std::shared_ptr<HostMemory> HostMemory::create(size_t bytes, size_t reserved) {
  HostFile file;
  file.bytes = round_up(bytes, kHugePage);
  std::random_device random;
  file.number = uint64_t{random()} << 32 | random();
  file.fd = make_file(file.bytes);
  std::shared_ptr<HostMemory> memory(new HostMemory(file, map(file.fd, file.bytes)));
  std::memcpy(memory->data_, &file.number, sizeof(file.number));
  memory->used_ = round_up(kReservedAt + reserved, kAlignment);
  memory->free_.emplace(memory->used_, file.bytes - memory->used_);
  return memory;
}

HostMemory::~HostMemory() {
  ::munmap(data_, file_.bytes);
  ::close(file_.fd);
}

/// Takes the first gap that is large enough.
std::shared_ptr<char> HostMemory::allocate(size_t requested, bool zeroed) {
  const size_t bytes = round_up(std::max<size_t>(requested, 1), kAlignment);
  char* data = nullptr;
  size_t dirty = 0;  // leading bytes that may not be zero
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto gap = std::find_if(free_.begin(), free_.end(),
                                  [&](const auto& one) { return one.second >= bytes; });
    if (gap == free_.end())
      throw Error("no shared memory: a message of " + std::to_string(requested) +
                  " bytes does not fit into the " + std::to_string(file_.bytes) +
                  " bytes of a rank; APEX_HOST_CHANNEL=0 makes the ranks use Gloo");
    const auto [offset, length] = *gap;
    free_.erase(gap);
    if (length > bytes) free_.emplace(offset + bytes, length - bytes);
    data = data_ + offset;
    dirty = std::min(bytes, used_ - std::min(used_, offset));
    used_ = std::max(used_, offset + bytes);
  }
  if (zeroed) std::memset(data, 0, dirty);
  return {data, [self = shared_from_this(), bytes](char* freed) { self->give_back(freed, bytes); }};
}

void HostMemory::give_back(char* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto begin = static_cast<size_t>(data - data_);
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  free_.emplace(begin, bytes);
}

std::optional<uint64_t> HostMemory::offset_of(const void* data, size_t bytes) const {
  const char* begin = static_cast<const char*>(data);
  if (begin < data_ || begin + bytes > data_ + file_.bytes) return std::nullopt;
  return static_cast<uint64_t>(begin - data_);
}

PeerMemory::PeerMemory(int64_t pid, const HostFile& file) : bytes_(file.bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(file.fd);
  const std::string name = "the memory of process " + std::to_string(pid) + " (" + path + ")";
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) throw_system_error(name);
  bool fits = has_size(fd, bytes_);
  if (fits) {
    data_ = map(fd, bytes_);
    fits = std::memcmp(data_, &file.number, sizeof(file.number)) == 0;
    if (!fits) ::munmap(data_, bytes_);
  }
  ::close(fd);  // the mapping keeps the file alive
  if (!fits) throw Error(name + " is not what that process reported");
}

PeerMemory::~PeerMemory() {
  if (!same_) ::munmap(data_, bytes_);
}

}  // namespace apex::parallel
