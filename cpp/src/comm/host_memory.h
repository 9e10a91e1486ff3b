// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Memory that processes of one host share.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace apex::parallel {

// Note [Memory between processes]
//
// A block is an anonymous file (memfd_create) that its owner maps, and that peers open through
// /proc/PID/fd and map, too. So it has no name, no limit of a mount applies to it, it is gone with
// the last process that maps it, however that ends, and the kernel lets nobody open it who might
// not trace the owner: no other user. Its size is sealed, so that no peer can be made to fault.
//
// Blocks are larger than what is asked of them, since pages that nobody touches cost nothing, and
// live as long as the memory: what is freed is used again for the next bucket. Peers map a block
// when they first come to it, except the first, which they map in the handshake: what lies there
// can be read when its owner has ended.

/// Where something lies in a process, for its peers. Trivially copyable: it is written into shared
/// memory.
struct HostPlace {
  int32_t fd = -1;     ///< of the block, in its owner
  uint32_t block = 0;  ///< counts the owner's blocks
  uint64_t bytes = 0;  ///< of the block
  uint64_t offset = 0;
};

/// This process's blocks. Thread safe.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  /// With a first block of `first_bytes`, zeroed.
  /// @throws Error if the system gives none.
  static std::shared_ptr<HostMemory> create(size_t first_bytes);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  /// The beginning of the first block, of which allocate() gives nothing before `reserved`.
  char* first() const { return first_; }
  HostPlace first_place() const;
  void reserve(size_t reserved);

  /// So many bytes, aligned to 64, not initialized; freed with the last pointer. Keeps the memory
  /// alive.
  /// @param in_first  from the first block; null if that is full.
  /// @throws Error if the system gives no more.
  std::shared_ptr<char> allocate(size_t bytes, bool in_first = false);
  /// The same, zeroed. What nobody has had before is zero, and takes no memory until it is written.
  std::shared_ptr<char> allocate_zeroed(size_t bytes);

  /// Where `data` lies for peers; nothing if it is not of this memory.
  std::optional<HostPlace> place_of(const void* data, size_t bytes) const;

  /// Reads the same memory in this process: for ranks that are threads.
  void* at(const HostPlace& place) const;

 private:
  struct Block {
    int fd = -1;
    char* data = nullptr;
    size_t bytes = 0;
    std::map<size_t, size_t> free;  ///< offset to length, merged
    size_t used = 0;                ///< nothing behind this offset was ever given out
  };
  struct Taken {
    char* data = nullptr;
    size_t dirty = 0;  ///< so many bytes, from the beginning, may not be zero
  };
  HostMemory() = default;
  void add_block(size_t bytes);
  Taken take(Block& block, size_t bytes);
  Taken take_anywhere(size_t bytes);
  std::shared_ptr<char> owned(char* data, size_t bytes);
  void give_back(char* data, size_t bytes);
  HostPlace place_in(size_t block, size_t offset) const;

  char* first_ = nullptr;
  mutable std::mutex mutex_;  ///< guards blocks_
  std::vector<Block> blocks_;
};

/// What is mapped of a peer's blocks. Not thread safe.
class PeerMemory {
 public:
  /// Of another process.
  explicit PeerMemory(int64_t pid) : pid_(pid) {}
  /// Of another rank in this process: the same addresses.
  explicit PeerMemory(std::shared_ptr<HostMemory> same) : same_(std::move(same)) {}
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// What lies there; maps its block if that is new.
  /// @throws Error if it cannot be opened or is not what the owner says.
  char* at(const HostPlace& place);

 private:
  struct Mapping {
    char* data = nullptr;
    size_t bytes = 0;
  };
  int64_t pid_ = 0;
  std::shared_ptr<HostMemory> same_;
  std::map<uint32_t, Mapping> mapped_;
};

}  // namespace apex::parallel
