#include "cuda_emulator.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <sstream>
#include <vector>

#include "cuda_runtime.h"

uint3 threadIdx{};
uint3 blockIdx{};
dim3 blockDim{};
dim3 gridDim{};

// By the linker: the section of all __shared__ variables. Weak, as a program may have none.
extern "C" {
extern char __start_cuda_emulator_shared[] __attribute__((weak));
extern char __stop_cuda_emulator_shared[] __attribute__((weak));
}

namespace apex::testing::cuda {
namespace {

using detail::Place;

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;
constexpr size_t kStackBytes = size_t{64} << 10;

enum class State { kReady, kAtBarrier, kExchanging, kOver };

struct Thread {
  State state = State::kReady;
  Place where{};
  // Two slots in turns: a lane that is one exchange ahead does not overwrite what others still read.
  std::array<uint64_t, 2> brought{};
  int exchanges = 0;
};

/// A stack for the threads of one index, one block after the other.
struct Fiber {
  bool begun = false;
  ucontext_t begin;
  jmp_buf turn;  // where it gave its turn; unlike contexts, these do not ask the kernel for a signal mask
};

/// The turns of the threads of one block after the other, all on the thread that launches.
class Emulator {
 public:
  static Emulator& instance() {
    static Emulator* const emulator = new Emulator;
    return *emulator;
  }

  cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++launches_;
    const dim3& block = config.blockDim;
    if (config.gridDim.x == 0 || config.gridDim.y != 1 || config.gridDim.z != 1 || block.x == 0 ||
        block.x > kMostThreads || block.x % kWarp != 0 || block.y != 1 || block.z != 1 ||
        config.dynamicSmemBytes != 0 || config.numAttrs != 0) {
      error_ = "a launch of " + std::to_string(config.gridDim.x) + " blocks of " + std::to_string(block.x) +
               " threads, or with what is not emulated";
      return cudaErrorInvalidConfiguration;
    }
    body_ = &thread;
    threads_.resize(block.x);
    ::gridDim = config.gridDim;
    ::blockDim = block;
    for (const unsigned index : order(config.gridDim.x)) {
      ::blockIdx = {index, 0, 0};
      if (!run_block()) {
        // Threads that wait for ever are given up, with what is on their stacks.
        for (Fiber& fiber : fibers_) fiber.begun = false;
        return cudaErrorLaunchFailure;
      }
    }
    return cudaSuccess;
  }

  void barrier(const Place& where) {
    Thread& mine = threads_[running_];
    mine.where = where;
    give_turn(State::kAtBarrier);
  }

  uint64_t exchange(unsigned mask, uint64_t value, int lane_mask, const Place& where) {
    Thread& mine = threads_[running_];
    mine.where = where;
    if (mask != 0xffffffffu || lane_mask < 0 || lane_mask >= static_cast<int>(kWarp)) {
      fail("an exchange that is not emulated: of some lanes only, or past the warp");
      give_turn(State::kExchanging);
    }
    const int slot = mine.exchanges++ % 2;
    mine.brought[slot] = value;
    give_turn(State::kExchanging);
    const unsigned partner = running_ ^ static_cast<unsigned>(lane_mask);
    return threads_[partner].brought[slot];
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
  std::string last_error() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

 private:
  Emulator() {
    stacks_ = static_cast<char*>(mmap(nullptr, kStackBytes * kMostThreads, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks_ == MAP_FAILED) throw std::bad_alloc();
  }

  std::vector<unsigned> order(unsigned count) {
    std::vector<unsigned> indices(count);
    std::iota(indices.begin(), indices.end(), 0u);
    if (seed_ == 1) std::reverse(indices.begin(), indices.end());
    if (seed_ > 1) std::shuffle(indices.begin(), indices.end(), random_);
    return indices;
  }

  static void enter() {
    Emulator& emulator = instance();
    for (;;) {
      (*emulator.body_)();
      emulator.give_turn(State::kOver);
    }
  }

  /// Returns with the next turn.
  void give_turn(State state) {
    threads_[running_].state = state;
    if (_setjmp(fibers_[running_].turn) == 0) _longjmp(scheduler_, 1);
  }

  /// Returns when the thread gives its turn.
  void take_turn(unsigned index) {
    running_ = index;
    ::threadIdx = {index, 0, 0};
    if (_setjmp(scheduler_) != 0) return;
    Fiber& fiber = fibers_[index];
    if (fiber.begun) _longjmp(fiber.turn, 1);
    fiber.begun = true;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = stacks_ + index * kStackBytes;
    fiber.begin.uc_stack.ss_size = kStackBytes;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, &Emulator::enter, 0);
    setcontext(&fiber.begin);
  }

  bool run_block() {
    if (__start_cuda_emulator_shared != nullptr) {
      std::memset(__start_cuda_emulator_shared, 0xff,
                  static_cast<size_t>(__stop_cuda_emulator_shared - __start_cuda_emulator_shared));
    }
    std::fill(threads_.begin(), threads_.end(), Thread{});
    failed_ = false;
    while (!failed_) {
      for (const unsigned i : order(static_cast<unsigned>(threads_.size()))) {
        if (threads_[i].state != State::kReady) continue;
        take_turn(i);
        if (failed_) return false;
        if (threads_[i].state == State::kExchanging) release_warp(i / kWarp);
      }
      const auto in = [this](State state) {
        return std::count_if(threads_.begin(), threads_.end(),
                             [state](const Thread& thread) { return thread.state == state; });
      };
      if (in(State::kReady) > 0) continue;
      if (in(State::kOver) == static_cast<int64_t>(threads_.size())) return true;
      if (in(State::kAtBarrier) == static_cast<int64_t>(threads_.size())) {
        release(0, static_cast<unsigned>(threads_.size()), "a barrier");
      } else {
        fail("threads wait for ever: " + describe());
      }
    }
    return false;
  }

  /// Lets the lanes of a warp go on if all have come.
  void release_warp(unsigned warp) {
    const unsigned begin = warp * kWarp;
    const bool complete = std::all_of(
        threads_.begin() + begin, threads_.begin() + begin + kWarp,
        [](const Thread& thread) { return thread.state == State::kExchanging; });
    if (complete) release(begin, begin + kWarp, "an exchange");
  }

  void release(unsigned begin, unsigned end, const char* what) {
    for (unsigned i = begin; i < end; ++i) {
      if (threads_[i].where.line != threads_[begin].where.line ||
          std::strcmp(threads_[i].where.file, threads_[begin].where.file) != 0) {
        fail(std::string("threads are at ") + what + " in different places: " + describe());
        return;
      }
      threads_[i].state = State::kReady;
    }
  }

  /// Who waits where: one thread of each kind.
  std::string describe() const {
    std::ostringstream text;
    const Thread* before = nullptr;
    for (unsigned i = 0; i < threads_.size(); ++i) {
      const Thread& thread = threads_[i];
      if (before != nullptr && before->state == thread.state && before->where.line == thread.where.line) {
        continue;
      }
      before = &thread;
      text << "from thread " << i << " on "
           << (thread.state == State::kOver         ? "over"
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
  std::string error_;
  bool failed_ = false;

  const std::function<void()>* body_ = nullptr;
  std::vector<Thread> threads_;
  unsigned running_ = 0;
  std::array<Fiber, kMostThreads> fibers_;
  jmp_buf scheduler_;
  char* stacks_;
};

}  // namespace

namespace detail {

cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  return Emulator::instance().run(config, thread);
}
void barrier(const Place& where) { Emulator::instance().barrier(where); }
uint64_t exchange(unsigned mask, uint64_t value, int lane_mask, const Place& where) {
  return Emulator::instance().exchange(mask, value, lane_mask, where);
}

}  // namespace detail

void set_order(uint64_t seed) { Emulator::instance().set_order(seed); }
int64_t launches() { return Emulator::instance().launches(); }
std::string last_error() { return Emulator::instance().last_error(); }

}  // namespace apex::testing::cuda
