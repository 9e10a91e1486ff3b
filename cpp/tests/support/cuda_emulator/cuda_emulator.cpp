// SPDX-License-Identifier: BSD-3-Clause
#include "cuda_emulator.h"

#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

uint3 threadIdx{};
uint3 blockIdx{};
dim3 blockDim{};
dim3 gridDim{};

namespace apex::testing::cuda {
namespace {

using detail::Place;

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kMostResident = 3;
constexpr size_t kStackBytes = size_t{64} << 10;

enum class State { kReady, kAtBarrier, kExchanging, kOver };

struct Thread {
  State state = State::kReady;
  Place where{};
  // Two slots in turn: a lane that is one exchange ahead does not overwrite a value that others
  // still read.
  std::array<uint64_t, 2> brought{};
  int exchanges = 0;
};

/// A stack for the threads of one index, reused block after block.
struct Fiber {
  bool begun = false;
  ucontext_t begin;
  jmp_buf turn;  // where it yielded; unlike contexts, jmp_buf does not save the signal mask with a
                 // system call
};

/// A block in progress, and its state.
struct Block {
  uint3 index{};
  bool over = true;
  std::vector<Thread> threads;
  std::vector<char> shared;  // its shared variables while another block runs
  std::array<Fiber, kMostThreads> fibers;
};

/// The calling thread's thread_local variables of the program.
struct ThreadLocals {
  char* begin = nullptr;
  size_t bytes = 0;
};

ThreadLocals thread_locals() {
  ThreadLocals found;
  // The program itself is listed first.
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type == PT_TLS) {
            *static_cast<ThreadLocals*>(out) = {static_cast<char*>(info->dlpi_tls_data),
                                                info->dlpi_phdr[i].p_memsz};
          }
        }
        return 1;
      },
      &found);
  return found;
}

/// Schedules blocks and their threads on one thread of the emulator. Its thread_local variables are
/// exactly the __shared__ variables, so they can be swapped with the block.
class Emulator {
 public:
  static Emulator& instance() {
    static Emulator* const emulator = new Emulator;
    return *emulator;
  }

  cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++launches_;
    blocks_of_last_ = config.gridDim.x;
    if (fault_ == Fault::kLaunchesFail) {
      error_ = "launches fail, as a test wants it";
      return cudaErrorLaunchFailure;
    }
    const dim3& block = config.blockDim;
    if (config.gridDim.x == 0 || config.gridDim.y != 1 || config.gridDim.z != 1 || block.x == 0 ||
        block.x > kMostThreads || block.x % kWarp != 0 || block.y != 1 || block.z != 1 ||
        config.dynamicSmemBytes != 0 || config.numAttrs != 0) {
      error_ = "a launch of " + std::to_string(config.gridDim.x) + " blocks of " +
               std::to_string(block.x) + " threads, or with what is not emulated";
      return cudaErrorInvalidConfiguration;
    }
    body_ = &thread;
    ::gridDim = config.gridDim;
    ::blockDim = block;
    failed_ = false;
    {
      std::unique_lock<std::mutex> turn(device_mutex_);
      device_busy_ = true;
      device_turn_.notify_all();
      device_turn_.wait(turn, [this] { return !device_busy_; });
    }
    if (!failed_) return cudaSuccess;
    // Threads that wait indefinitely are dropped with their stacks.
    for (Block& resident : blocks_) {
      for (Fiber& fiber : resident.fibers) fiber.begun = false;
      resident.over = true;
    }
    return cudaErrorLaunchFailure;
  }

  void barrier(const Place& where) {
    Thread& mine = block_->threads[running_];
    mine.where = where;
    give_turn(State::kAtBarrier);
  }

  uint64_t exchange(unsigned mask, uint64_t value, int lane_mask, const Place& where) {
    Thread& mine = block_->threads[running_];
    mine.where = where;
    if (mask != 0xffffffffu || lane_mask < 0 || lane_mask >= static_cast<int>(kWarp)) {
      fail("an exchange that is not emulated: of some lanes only, or past the warp");
      give_turn(State::kExchanging);
    }
    const int slot = mine.exchanges++ % 2;
    mine.brought[slot] = value;
    give_turn(State::kExchanging);
    const unsigned partner = running_ ^ static_cast<unsigned>(lane_mask);
    return block_->threads[partner].brought[slot];
  }

  void set_order(uint64_t seed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    seed_ = seed;
    random_.seed(seed);
  }
  int64_t launches() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return launches_;
  }
  unsigned blocks() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return blocks_of_last_;
  }
  void set_fault(Fault fault) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fault_ = fault;
  }
  std::string last_error() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

 private:
  Emulator() {
    stacks_ = static_cast<char*>(mmap(nullptr, kStackBytes * kMostThreads * kMostResident,
                                      PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks_ == MAP_FAILED) throw std::bad_alloc();
    std::thread([this] { run_device(); }).detach();
  }

  void run_device() {
    shared_ = thread_locals();
    std::unique_lock<std::mutex> turn(device_mutex_);
    for (;;) {
      device_turn_.wait(turn, [this] { return device_busy_; });
      const bool loses = fault_ == Fault::kBlocksAreLost && ::gridDim.x > 1;
      run_blocks(order(::gridDim.x - loses));
      device_busy_ = false;
      device_turn_.notify_all();
    }
  }

  bool shuffles() const { return seed_ > 1; }
  size_t random_below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

  std::vector<unsigned> order(unsigned count) {
    std::vector<unsigned> indices(count);
    std::iota(indices.begin(), indices.end(), 0u);
    if (seed_ == 1) std::reverse(indices.begin(), indices.end());
    if (shuffles()) std::shuffle(indices.begin(), indices.end(), random_);
    return indices;
  }

  static void enter() {
    Emulator& emulator = instance();
    for (;;) {
      (*emulator.body_)();
      emulator.give_turn(State::kOver);
    }
  }

  /// Yields; returns with the thread's next turn.
  void give_turn(State state) {
    block_->threads[running_].state = state;
    if (_setjmp(block_->fibers[running_].turn) == 0) _longjmp(scheduler_, 1);
  }

  /// Runs a thread until it yields.
  void take_turn(unsigned index) {
    running_ = index;
    ::threadIdx = {index, 0, 0};
    if (_setjmp(scheduler_) != 0) return;
    Fiber& fiber = block_->fibers[index];
    if (fiber.begun) _longjmp(fiber.turn, 1);
    fiber.begun = true;
    getcontext(&fiber.begin);
    const size_t stack = static_cast<size_t>(block_ - blocks_.data()) * kMostThreads + index;
    fiber.begin.uc_stack.ss_sp = stacks_ + stack * kStackBytes;
    fiber.begin.uc_stack.ss_size = kStackBytes;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, &Emulator::enter, 0);
    setcontext(&fiber.begin);
  }

  void run_blocks(const std::vector<unsigned>& indices) {
    size_t begun = 0;
    while (!failed_) {
      std::vector<Block*> resident;
      for (size_t i = 0; i < (shuffles() ? blocks_.size() : 1); ++i) {
        Block& block = blocks_[i];
        if (block.over && begun < indices.size()) {
          block.index = {indices[begun++], 0, 0};
          block.over = false;
          block.threads.assign(::blockDim.x, Thread{});
          block.shared.assign(shared_.bytes, static_cast<char>(0xff));
        }
        if (!block.over) resident.push_back(&block);
      }
      if (resident.empty()) return;
      // Mostly keeps the same block, so that one block can get far ahead of another.
      const bool stays = std::find(resident.begin(), resident.end(), block_) != resident.end();
      if (!stays || (resident.size() > 1 && random_below(4) == 0)) {
        block_ = resident[resident.size() > 1 ? random_below(resident.size()) : 0];
      }
      ::blockIdx = block_->index;
      std::copy(block_->shared.begin(), block_->shared.end(), shared_.begin);
      const size_t threads = block_->threads.size();
      run_block(shuffles() ? 1 + random_below(2 * threads) : threads);
      std::copy_n(shared_.begin, shared_.bytes, block_->shared.begin());
    }
  }

  /// Gives the threads of the block up to `turns` turns.
  void run_block(size_t turns) {
    std::vector<Thread>& threads = block_->threads;
    for (const unsigned i : order(static_cast<unsigned>(threads.size()))) {
      if (threads[i].state != State::kReady) continue;
      if (turns-- == 0) return;
      take_turn(i);
      if (failed_) return;
      if (threads[i].state == State::kExchanging) release_warp(i / kWarp);
      if (failed_) return;
    }
    const auto in = [&threads](State state) {
      return static_cast<size_t>(
          std::count_if(threads.begin(), threads.end(),
                        [state](const Thread& thread) { return thread.state == state; }));
    };
    if (in(State::kReady) > 0) return;
    if (in(State::kOver) == threads.size()) {
      block_->over = true;
    } else if (in(State::kAtBarrier) == threads.size()) {
      release(0, static_cast<unsigned>(threads.size()), "a barrier");
    } else {
      fail("threads wait for ever: " + describe());
    }
  }

  /// Resumes the lanes of a warp once all have arrived.
  void release_warp(unsigned warp) {
    const unsigned begin = warp * kWarp;
    const auto first = block_->threads.begin() + begin;
    const bool complete = std::all_of(first, first + kWarp, [](const Thread& thread) {
      return thread.state == State::kExchanging;
    });
    if (complete) release(begin, begin + kWarp, "an exchange");
  }

  void release(unsigned begin, unsigned end, const char* what) {
    std::vector<Thread>& threads = block_->threads;
    for (unsigned i = begin; i < end; ++i) {
      if (threads[i].where.line != threads[begin].where.line ||
          std::strcmp(threads[i].where.file, threads[begin].where.file) != 0) {
        fail(std::string("threads are at ") + what + " in different places: " + describe());
        return;
      }
      threads[i].state = State::kReady;
    }
  }

  /// Describes the waiting threads, one of each kind.
  std::string describe() const {
    std::ostringstream text;
    const Thread* before = nullptr;
    for (unsigned i = 0; i < block_->threads.size(); ++i) {
      const Thread& thread = block_->threads[i];
      if (before != nullptr && before->state == thread.state &&
          before->where.line == thread.where.line) {
        continue;
      }
      before = &thread;
      text << "from thread " << i << " on "
           << (thread.state == State::kOver        ? "over"
               : thread.state == State::kAtBarrier ? "at a barrier"
                                                   : "in an exchange");
      if (thread.state != State::kOver) text << " at line " << thread.where.line;
      text << "; ";
    }
    text << "block " << ::blockIdx.x << " of " << ::gridDim.x;
    return text.str();
  }

  void fail(std::string error) {
    error_ = std::move(error);
    failed_ = true;
  }

  std::mutex mutex_;
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
  int64_t launches_ = 0;
  unsigned blocks_of_last_ = 0;
  Fault fault_ = Fault::kNone;
  std::string error_;
  bool failed_ = false;

  std::mutex device_mutex_;
  std::condition_variable device_turn_;
  bool device_busy_ = false;

  ThreadLocals shared_;
  const std::function<void()>* body_ = nullptr;
  std::array<Block, kMostResident> blocks_;
  Block* block_ = nullptr;  // the block that runs
  unsigned running_ = 0;    // the thread that runs
  jmp_buf scheduler_;
  char* stacks_;
};

}  // namespace

namespace detail {

cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  return Emulator::instance().run(config, thread);
}
Device& device() {
  static Device device;
  return device;
}
void barrier(const Place& where) { Emulator::instance().barrier(where); }
uint64_t exchange(unsigned mask, uint64_t value, int lane_mask, const Place& where) {
  return Emulator::instance().exchange(mask, value, lane_mask, where);
}

}  // namespace detail

void set_order(uint64_t seed) { Emulator::instance().set_order(seed); }
int64_t launches() { return Emulator::instance().launches(); }
unsigned blocks() { return Emulator::instance().blocks(); }
void set_device(int number, int resident_threads) { detail::device() = {number, resident_threads}; }
void set_fault(Fault fault) { Emulator::instance().set_fault(fault); }
std::string last_error() { return Emulator::instance().last_error(); }

}  // namespace apex::testing::cuda
