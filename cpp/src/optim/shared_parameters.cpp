// SPDX-License-Identifier: BSD-3-Clause
#include "optim/shared_parameters.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "comm/host_memory.h"
#include "transport/separate_group.h"
#include "watch/process_state.h"
#include "watch/watcher.h"

namespace apex::parallel {

namespace {

/// Parameters begin at multiples of this.
constexpr int64_t kPlaceAlignment = 64;
/// For another rank's step to end. A longer wait would delay an error too much.
constexpr std::chrono::seconds kLongestWait{60};
/// How long a rank waits for late ranks before it copies its pieces, which takes longer.
constexpr std::chrono::microseconds kWaitForBegin{200};
/// Bytes per thread.
constexpr int64_t kCopyGrain = int64_t{1} << 20;

/// Copies bytes [begin, end) for each of `spans`.
void copy_spans(const at::Tensor& to, const at::Tensor& from,
                const std::vector<std::pair<int64_t, int64_t>>& spans) {
  char* const target = static_cast<char*>(to.mutable_data_ptr());
  const char* const source = static_cast<const char*>(from.const_data_ptr());
  for (const auto& [first, last] : spans) {
    at::parallel_for(first, last, kCopyGrain, [&](int64_t begin, int64_t end) {
      std::memcpy(target + begin, source + begin, static_cast<size_t>(end - begin));
    });
  }
}

/// Moves the storage of `parameter` to `place`, which has its bytes, if no other tensor, Python
/// object or library refers to that storage. (Through DLPack a library may refer to the tensor
/// itself, but not to one that requires gradients.)
void move_storage(const at::Tensor& parameter, const at::Tensor& place) {
  if (!parameter.requires_grad()) return;
  parameter.mutable_data_ptr();  // a copy on write is made now
  const c10::Storage& storage = parameter.storage();
  const bool ours = storage.use_count() == 1 && storage.allocator() == c10::GetCPUAllocator() &&
                    storage.nbytes() == place.nbytes();
  if (!ours) return;
  void* const data = place.mutable_data_ptr();
  auto* const owner = new at::Tensor(place);
  storage.set_data_ptr_noswap(c10::DataPtr(
      data, owner, [](void* held) { delete static_cast<at::Tensor*>(held); }, at::kCPU));
}

}  // namespace

at::Tensor bytes_of(const at::Tensor& parameter, const ParameterPiece& piece) {
  const at::Tensor detached = parameter.detach();
  const at::Tensor flat =
      detached.as_strided({piece.end - piece.begin}, {1}, detached.storage_offset() + piece.begin);
  return (flat.is_complex() ? at::view_as_real(flat).view(-1) : flat).view(at::kByte);
}

/// In each rank's memory and written by that rank. But all ranks write `outcome` of rank 0.
struct SharedParameters::Control {
  alignas(kPlaceAlignment) std::atomic<uint64_t> outcome;   ///< 2k: step k complete; 2k + 1:
                                                            ///< abandoned
  alignas(kPlaceAlignment) std::atomic<uint64_t> changing;  ///< the step in progress; 0: none
  std::atomic<uint64_t> begun;                              ///< the last step
  std::atomic<uint64_t> pid, start_time;
};

struct SharedParameters::Arena {
  std::vector<at::Tensor> parameters;
  Pieces pieces;                    ///< by rank
  std::vector<int64_t> places;      ///< of each parameter, in bytes
  std::vector<at::Tensor> of_rank;  ///< the bytes of every rank
  /// Bytes [begin, end) of each rank's pieces, merged where they meet.
  std::vector<std::vector<std::pair<int64_t, int64_t>>> spans;

  at::Tensor place_of(const ParameterPiece& piece, size_t rank) const {
    const auto i = static_cast<size_t>(piece.parameter);
    const auto size = static_cast<int64_t>(parameters[i].element_size());
    return of_rank[rank].narrow(0, places[i] + piece.begin * size,
                                (piece.end - piece.begin) * size);
  }
};

struct SharedParameters::Copied {
  std::vector<at::Tensor> parameters, places;

  void out() const {
    if (!places.empty()) at::_foreach_copy_(places, parameters);
  }
  void in() const {
    if (!places.empty()) at::_foreach_copy_(parameters, places);
  }
};

SharedParameters::SharedParameters(Membership members)
    : members_(std::move(members)),
      rank_(static_cast<size_t>(members_.rank)),
      size_(static_cast<size_t>(members_.size)) {
  controls_ = share_memory("memory of a ShardedOptimizer", *members_.parent, sizeof(Control),
                           [](const at::Tensor& mine) {
                             auto* const control = new (mine.mutable_data_ptr()) Control{};
                             const std::optional<ProcessName> process = this_process();
                             if (!process) return;
                             control->pid = static_cast<uint64_t>(process->pid);
                             control->start_time = process->start_time;
                           });
}

SharedParameters::~SharedParameters() = default;

SharedParameters::Control& SharedParameters::control(size_t rank) const {
  return *static_cast<Control*>(controls_[rank].mutable_data_ptr());
}

void SharedParameters::add(const std::vector<at::Tensor>& parameters, const Pieces& pieces) {
  Arena arena;
  arena.parameters = parameters;
  arena.pieces = pieces;
  int64_t bytes = 0;
  for (const at::Tensor& parameter : parameters) {
    arena.places.push_back(bytes);
    bytes += (static_cast<int64_t>(parameter.nbytes()) + kPlaceAlignment - 1) / kPlaceAlignment *
             kPlaceAlignment;
  }
  const auto whole = [](const at::Tensor& parameter, size_t i) {
    return ParameterPiece{static_cast<int64_t>(i), 0, parameter.numel()};
  };
  const auto fill = [&](const at::Tensor& mine) {
    arena.of_rank.assign(rank_ + 1, mine);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const ParameterPiece piece = whole(parameters[i], i);
      arena.place_of(piece, rank_).copy_(bytes_of(parameters[i], piece));
    }
  };
  arena.of_rank = share_memory("parameters of a ShardedOptimizer", *members_.parent,
                               std::max<int64_t>(bytes, 1), fill);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].numel() > 0)
      move_storage(parameters[i], arena.place_of(whole(parameters[i], i), rank_));
  }
  for (const auto& of_rank : pieces) {
    auto& spans = arena.spans.emplace_back();
    for (const ParameterPiece& piece : of_rank) {
      const auto i = static_cast<size_t>(piece.parameter);
      const auto size = static_cast<int64_t>(parameters[i].element_size());
      const int64_t begin = arena.places[i] + piece.begin * size;
      const int64_t end = arena.places[i] + piece.end * size;
      // The gap between two parameters is copied as well.
      if (!spans.empty() && begin - spans.back().second < kPlaceAlignment) {
        spans.back().second = end;
      } else {
        spans.emplace_back(begin, end);
      }
    }
  }
  arenas_.push_back(std::move(arena));
  saved_.reset();  // of another size
  find_memory();
}

void SharedParameters::find_memory() {
  copied_.assign(size_, {});
  for (const Arena& arena : arenas_) {
    for (size_t rank = 0; rank < size_; ++rank) {
      for (const ParameterPiece& piece : arena.pieces[rank]) {
        if (piece.begin == piece.end) continue;
        const at::Tensor bytes =
            bytes_of(arena.parameters[static_cast<size_t>(piece.parameter)], piece);
        const at::Tensor place = arena.place_of(piece, rank_);
        if (bytes.const_data_ptr() == place.const_data_ptr()) continue;
        copied_[rank].parameters.push_back(bytes);
        copied_[rank].places.push_back(place);
      }
    }
  }
}

bool SharedParameters::all_have_begun(uint64_t number) const {
  for (size_t rank = 0; rank < size_; ++rank) {
    if (control(rank).begun.load() < number) return false;
  }
  return true;
}

void SharedParameters::save() {
  std::vector<at::Tensor> pieces;
  for (const Arena& arena : arenas_) {
    for (const ParameterPiece& piece : arena.pieces[rank_])
      pieces.push_back(bytes_of(arena.parameters[static_cast<size_t>(piece.parameter)], piece));
  }
  if (!saved_.defined()) saved_ = at::empty({0}, at::kByte);
  if (!pieces.empty()) at::cat_out(saved_, pieces);
  is_saved_ = true;
}

void SharedParameters::begin(int64_t number, const std::string& what, bool changed) {
  const auto step = static_cast<uint64_t>(number);
  Control& mine = control(rank_);
  mine.changing = step;  // before `outcome` is read: see wait_for_others()
  if (control(0).outcome.load() / 2 >= step) {
    mine.changing = 0;
    throw_communication_error(what, *members_.parent,
                              std::make_exception_ptr(Error("another rank has given the step up")));
  }
  HostMemory::drop_fork_copies();
  mine.begun = step;
  const auto until = std::chrono::steady_clock::now() + kWaitForBegin;
  while (!changed && !all_have_begun(step) && std::chrono::steady_clock::now() < until)
    std::this_thread::yield();
  is_saved_ = false;
  if (changed || !all_have_begun(step)) save();
}

/// Sets the outcome of a step, unless another rank has; returns whether the step is complete.
bool SharedParameters::decide(int64_t number, bool complete) {
  const uint64_t wanted = static_cast<uint64_t>(number) * 2 + (complete ? 0 : 1);
  std::atomic<uint64_t>& outcome = control(0).outcome;
  uint64_t seen = outcome.load();
  while (seen / 2 < wanted / 2 && !outcome.compare_exchange_weak(seen, wanted)) {
  }
  return outcome.load() % 2 == 0;
}

/// Copies the pieces of the other ranks, which have all stepped them.
void SharedParameters::receive() {
  for (const Arena& arena : arenas_) {
    for (size_t rank = 0; rank < size_; ++rank) {
      if (rank != rank_) copy_spans(arena.of_rank[rank_], arena.of_rank[rank], arena.spans[rank]);
    }
  }
  for (size_t rank = 0; rank < size_; ++rank) {
    if (rank != rank_) copied_[rank].in();
  }
  control(rank_).changing = 0;
}

void SharedParameters::exchange(int64_t number, const std::string& what) {
  const auto barrier = [&](const std::string& which) {
    members_.run(which, [&](c10d::ProcessGroup& channel) {
      return issue_all_reduce(which, channel, at::zeros({1}, at::kByte));
    });
  };
  copied_[rank_].out();
  barrier(what);
  if (!decide(number, /*complete=*/true)) {
    throw_communication_error(what, *members_.parent,
                              std::make_exception_ptr(Error("another rank has given the step up")));
  }
  receive();
  barrier(what + ", received");
}

void SharedParameters::give_up(int64_t number) {
  const bool complete = decide(number, /*complete=*/false);
  // Ranks that have received everything may already change their parameters.
  if (control(rank_).changing.load() != static_cast<uint64_t>(number)) return;
  if (complete) return receive();
  const size_t other = (rank_ + 1) % size_;  // has begun the step and received no piece
  int64_t begin = 0;
  for (const Arena& arena : arenas_) {
    if (!is_saved_) copy_spans(arena.of_rank[rank_], arena.of_rank[other], arena.spans[rank_]);
    for (const ParameterPiece& piece : arena.pieces[rank_]) {
      const at::Tensor place = arena.place_of(piece, rank_);
      if (is_saved_) place.copy_(saved_.narrow(0, begin, place.numel()));
      begin += place.numel();
    }
  }
  copied_[rank_].in();
  control(rank_).changing = 0;
}

void SharedParameters::wait_for_others(int64_t number) const {
  const auto until = std::chrono::steady_clock::now() + kLongestWait;
  const std::optional<ProcessName> process = this_process();
  for (size_t rank = 0; rank < size_; ++rank) {
    const Control& other = control(rank);
    const ProcessName name{process ? process->host : std::string(),
                           static_cast<int64_t>(other.pid.load()), other.start_time.load()};
    while (rank != rank_ && other.changing.load() == static_cast<uint64_t>(number) &&
           !(process && state_of(name) != ProcessState::kUnknown) &&
           std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

}  // namespace apex::parallel
