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
#include <string>
#include <utility>

#include <apex/error.h>

namespace apex::parallel {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kBlockBytes = size_t{64} << 20;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

[[noreturn]] void throw_system_error(const std::string& what) {
  throw Error(what + ": " + std::strerror(errno));
}

char* map(int fd, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw_system_error("shared memory could not be mapped (mmap)");
  ::madvise(data, bytes, MADV_HUGEPAGE);  // not every system supports huge pages
  return static_cast<char*>(data);
}

void unmap(char* data, size_t bytes) { ::munmap(data, bytes); }

int make_file(size_t bytes) {
  // A larger file would end the process by SIGXFSZ.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes)
    throw Error("no shared memory: the limit on file sizes is " + std::to_string(limit.rlim_cur) +
                " bytes (ulimit -f)");
  const int fd = ::memfd_create("apex", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_system_error("no shared memory (memfd_create)");
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    ::close(fd);
    errno = error;
    throw_system_error("no shared memory (ftruncate)");
  }
  return fd;
}

/// Opens a peer's block.
int open_file(int64_t pid, const HostPlace& place) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(place.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0)
    throw_system_error("the memory of process " + std::to_string(pid) + " (" + path + ")");
  struct stat status{};
  const int seals = ::fcntl(fd, F_GET_SEALS);  // -1: another kind of file
  const bool fits = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
                    static_cast<uint64_t>(status.st_size) == place.bytes && seals >= 0 &&
                    (seals & F_SEAL_SHRINK) != 0;
  if (!fits) {
    ::close(fd);
    throw Error("the memory of process " + std::to_string(pid) + " (" + path +
                ") does not match what that process reported");
  }
  return fd;
}

}  // namespace

std::shared_ptr<HostMemory> HostMemory::create(size_t first_bytes) {
  std::shared_ptr<HostMemory> memory(new HostMemory);
  memory->add_block(round_up(first_bytes, kHugePage));
  memory->first_ = memory->blocks_.front().data;
  return memory;
}

HostMemory::~HostMemory() {
  for (const Block& block : blocks_) {
    unmap(block.data, block.bytes);
    ::close(block.fd);
  }
}

void HostMemory::add_block(size_t bytes) {
  Block block;
  block.bytes = bytes;
  block.fd = make_file(bytes);
  try {
    block.data = map(block.fd, bytes);
  } catch (...) {
    ::close(block.fd);
    throw;
  }
  block.free.emplace(0, bytes);
  blocks_.push_back(std::move(block));
}

void HostMemory::reserve(size_t reserved) {
  const std::lock_guard<std::mutex> lock(mutex_);
  take(blocks_.front(), round_up(reserved, kAlignment));
}

/// Takes the first gap that is large enough.
HostMemory::Taken HostMemory::take(Block& block, size_t bytes) {
  const auto gap = std::find_if(block.free.begin(), block.free.end(),
                                [&](const auto& one) { return one.second >= bytes; });
  if (gap == block.free.end()) return {};
  const auto [offset, length] = *gap;
  block.free.erase(gap);
  if (length > bytes) block.free.emplace(offset + bytes, length - bytes);
  // The owner may have written an identification at the end of a block.
  const bool to_end = offset + bytes == block.bytes;
  const size_t dirty = to_end ? bytes : std::min(bytes, block.used - std::min(block.used, offset));
  block.used = std::max(block.used, offset + bytes);
  return {block.data + offset, dirty};
}

/// Requires the mutex.
HostMemory::Taken HostMemory::take_anywhere(size_t bytes) {
  for (Block& block : blocks_) {
    if (const Taken taken = take(block, bytes); taken.data != nullptr) return taken;
  }
  add_block(std::max(kBlockBytes, round_up(bytes, kHugePage)));
  return take(blocks_.back(), bytes);
}

std::shared_ptr<char> HostMemory::owned(char* data, size_t bytes) {
  return {data, [self = shared_from_this(), bytes](char* freed) { self->give_back(freed, bytes); }};
}

void HostMemory::give_back(char* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Block& block : blocks_) {
    if (data < block.data || data >= block.data + block.bytes) continue;
    auto begin = static_cast<size_t>(data - block.data);
    size_t length = bytes;
    auto next = block.free.lower_bound(begin);
    if (next != block.free.end() && next->first == begin + length) {
      length += next->second;
      next = block.free.erase(next);
    }
    if (next != block.free.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == begin) {
        begin = before->first;
        length += before->second;
        block.free.erase(before);
      }
    }
    block.free.emplace(begin, length);
    return;
  }
}

std::shared_ptr<char> HostMemory::allocate(size_t bytes, bool in_first) {
  const size_t rounded = round_up(std::max<size_t>(bytes, 1), kAlignment);
  char* data = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    data = (in_first ? take(blocks_.front(), rounded) : take_anywhere(rounded)).data;
  }
  return data == nullptr ? nullptr : owned(data, rounded);
}

std::shared_ptr<char> HostMemory::allocate_zeroed(size_t bytes) {
  const size_t rounded = round_up(std::max<size_t>(bytes, 1), kAlignment);
  Taken taken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken = take_anywhere(rounded);
  }
  std::memset(taken.data, 0, taken.dirty);
  return owned(taken.data, rounded);
}

HostPlace HostMemory::first_place() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return place_in(0, 0);
}

HostPlace HostMemory::place_in(size_t block, size_t offset) const {
  const Block& of = blocks_[block];
  return {of.fd, static_cast<uint32_t>(block), of.bytes, offset};
}

std::optional<HostPlace> HostMemory::place_of(const void* data, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const char* begin = static_cast<const char*>(data);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Block& block = blocks_[i];
    if (begin >= block.data && begin + bytes <= block.data + block.bytes)
      return place_in(i, static_cast<size_t>(begin - block.data));
  }
  return std::nullopt;
}

void* HostMemory::at(const HostPlace& place) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return blocks_[place.block].data + place.offset;
}

PeerMemory::~PeerMemory() {
  for (const auto& [block, mapping] : mapped_) unmap(mapping.data, mapping.bytes);
}

char* PeerMemory::at(const HostPlace& place) {
  if (same_) return static_cast<char*>(same_->at(place));
  auto found = mapped_.find(place.block);
  if (found == mapped_.end()) {
    const int fd = open_file(pid_, place);
    Mapping mapping{nullptr, place.bytes};
    try {
      mapping.data = map(fd, place.bytes);
    } catch (...) {
      ::close(fd);
      throw;
    }
    ::close(fd);  // the mapping keeps the file alive
    found = mapped_.emplace(place.block, mapping).first;
  }
  return found->second.data + place.offset;
}

}  // namespace apex::parallel
