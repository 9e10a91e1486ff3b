// SPDX-License-Identifier: BSD-3-Clause
#include "batch_norm/exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <apex/error.h>

#include "comm/announcer.h"
#include "comm/collectives.h"
#include "comm/slices.h"
#include "distributed/backends.h"
#include "torch_version.h"
#include "transport/separate_group.h"
#include "watch/watched_group.h"

namespace apex::parallel::detail {

namespace {

// Note [Ranks in different layers]
//
// The collectives of a layer are matched by their order. A rank that has skipped or repeated one,
// or is in backward while others are in forward, sends a message that its peers do not expect. If
// that message is larger, Gloo ends the peer's process by an exception on a Gloo thread. If it is
// smaller or equal, values are mixed without an error. So the first message begins with a header
// that identifies the exchange, and every rank checks all headers before it reads a value. Values
// that do not fit into the first message follow in a second one. Over Gloo the first message is an
// all-to-all with a receive buffer that is larger than needed, which an all-to-all allows because
// each rank chooses the lengths that it expects. (All ranks get the same values, so it works as an
// all-gather. A rank sends to all peers at once, while Gloo's all-gather passes messages around a
// ring.) In shared memory the first message is an all-gather. It has the same length for every
// layer, so that headers can be read even if the layers differ.

struct Header {
  static constexpr size_t kNameLength = 40;
  int64_t bytes = 0;  ///< size of the values that follow
  int64_t channels = 0;
  int64_t number = 0;  ///< number of this exchange in its group; refused exchanges also count
  Direction direction = Direction::kForward;
  int32_t name_length = 0;
  char name[kNameLength] = {};  ///< the last characters of the layer's name

  bool matches(const Header& other) const {
    return bytes == other.bytes && channels == other.channels && number == other.number &&
           direction == other.direction &&
           (name_length == 0 || other.name_length == 0 || layer() == other.layer());
  }
  std::string layer() const { return {name, static_cast<size_t>(name_length)}; }
};
static_assert(sizeof(Header) % sizeof(double) == 0, "what follows is aligned");

/// Receive buffer for the first message of one rank over Gloo. Pages that are not written cost
/// nothing.
constexpr int64_t kRoom = int64_t{1} << 20;
static_assert(kRoom <= kSliceBytes, "the first message is issued in one piece");
/// The same in shared memory: a header and the values of about 500 channels.
constexpr int64_t kRoomInMemory = int64_t{8} << 10;

/// If the messages of all ranks together are larger than this, the backend's all-reduce is faster
/// than an all-gather and a local sum.
constexpr size_t kMaxGatheredBytes = size_t{1} << 20;

/// The number of the next exchange in `group`. Exchanges that this rank has refused also count.
int64_t next_exchange(const c10d::ProcessGroup& group) {
  const WatchedGroupPtr known = watched(group);
  return known ? ++known->exchanges : 0;
}

Header header_of(const Peers& peers, int64_t bytes, Direction direction, int64_t channels) {
  Header header;
  header.bytes = bytes;
  header.channels = channels;
  header.number = next_exchange(*peers.group);
  header.direction = direction;
  const size_t length = std::min(peers.layer.size(), Header::kNameLength);
  header.name_length = static_cast<int32_t>(length);
  std::copy_n(peers.layer.end() - static_cast<std::ptrdiff_t>(length), length, header.name);
  return header;
}

const char* name_of(Direction direction) {
  switch (direction) {
    case Direction::kForward:
      return "forward";
    case Direction::kBackward:
      return "backward";
    default:
      return "second derivative";
  }
}

std::string describe(Direction direction, const std::string& layer) {
  return std::string(name_of(direction)) + " of " +
         (layer.empty() ? "a SyncBatchNorm" : "SyncBatchNorm '" + layer + "'");
}

std::string describe(Direction direction, const std::string& layer, int64_t channels) {
  return describe(direction, layer) + " of " + std::to_string(channels) + " channels";
}

std::string describe(const Peers& peers, Direction direction, int64_t channels) {
  return "exchange in " + describe(direction, peers.layer, channels);
}

void refuse_different(const c10d::ProcessGroup& group, const std::vector<Header>& headers) {
  const int rank = group.getRank();
  const auto different = std::find_if(headers.begin(), headers.end(), [&](const Header& header) {
    return !header.matches(headers[rank]);
  });
  if (different == headers.end()) return;
  std::string text = "rank " + std::to_string(rank) + " of " + std::to_string(headers.size()) +
                     ": the ranks are in different batch norm layers: ";
  const bool refused = different->number != headers[rank].number;
  int64_t last = 0;
  for (size_t r = 0; r < headers.size(); ++r) {
    const Header& header = headers[r];
    text += (r == 0 ? "rank " : ", rank ") + std::to_string(r) + " in " +
            describe(header.direction, header.layer(), header.channels);
    if (refused) text += ", its exchange number " + std::to_string(header.number);
    last = std::max(last, header.number);
  }
  if (const WatchedGroupPtr known = watched(group)) {  // all ranks throw; their numbers stay equal
    for (int64_t behind = last - headers[rank].number; behind > 0; --behind) known->calls.add({});
    known->exchanges = last;
  }
  throw RankMismatch(
      text +
      ". No values were exchanged. Run the same synchronized layers, with the same number of "
      "channels, in the same order in forward and backward on every rank; use eval() for a forward "
      "on one rank only, and DistributedDataParallel.join() if ranks have different numbers of "
      "batches" +
      note_on_ranks(group));
}

bool talks_over_gloo(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  return tensor.is_cpu() && has_backend(group, at::kCPU) &&
         distributed::gloo_timeout(*group.getBackend(at::kCPU)).has_value();
}

/// Checks the headers of all ranks, and concatenates the `local` of every rank. Without
/// `with_values` it only exchanges the headers, and returns an undefined tensor.
/// @throws RankMismatch if the headers differ.
at::Tensor gather_with_headers(const Peers& peers, const at::Tensor& local, Direction direction,
                               int64_t channels, bool with_values = true) {
  c10d::ProcessGroup& group = *peers.group;
  const auto ranks = static_cast<size_t>(group.getSize());
  const auto bytes = static_cast<int64_t>(local.nbytes());
  const Header mine = header_of(peers, bytes, direction, channels);
  constexpr auto kHeader = static_cast<int64_t>(sizeof(mine));
  const std::string waiting = describe(peers, direction, channels);
  const auto host = host_backend_of(group);
  const bool in_memory = host && host->shares_memory();
  const int64_t room = in_memory ? kRoomInMemory : kRoom;
  const bool fits = with_values && kHeader + bytes <= room;
  const int64_t length = in_memory ? room : kHeader + (fits ? bytes : 0);
  std::vector<int64_t> lengths(ranks, length), rooms(ranks, room);
  rooms[group.getRank()] = length;  // Gloo requires equal lengths here
  const at::Tensor share = at::zeros({length}, at::kByte);
  auto* const header = share.mutable_data_ptr<uint8_t>();
  std::memcpy(header, &mine, sizeof(mine));
  if (fits && bytes > 0) std::memcpy(header + kHeader, local.const_data_ptr(), local.nbytes());
  const at::Tensor received = at::empty({c10::sum_integers(rooms)}, at::kByte);
  // Over Gloo the name of the collective omits the layer: a rank that takes part only because of
  // join() does not know the layer.
  const auto work = in_memory
                        ? issue_all_gather("exchange of a SyncBatchNorm", group, received, share)
                        : issue_all_to_all(describe({}, direction, channels), group, received,
                                           share.repeat({group.getSize()}), rooms, lengths);
  wait_collective(work, waiting, group);
  remember_processes(group);
  std::vector<Header> headers(ranks);
  const auto* from = received.const_data_ptr<uint8_t>();
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::memcpy(&headers[rank], from, sizeof(Header));
    from += rooms[rank];
  }
  refuse_different(group, headers);
  if (!with_values) return {};
  const at::Tensor gathered = at::empty({group.getSize() * local.numel()}, local.options());
  if (!fits) {
    const char* const what = "values of a SyncBatchNorm";
    wait_collective(issue_all_gather(what, group, gathered, local), waiting, group);
    return gathered;
  }
  auto* to = static_cast<uint8_t*>(gathered.mutable_data_ptr());
  from = received.const_data_ptr<uint8_t>() + kHeader;
  for (size_t rank = 0; rank < ranks; ++rank) {
    to = std::copy_n(from, bytes, to);
    from += rooms[rank];
  }
  return gathered;
}

/// Sums in the order of the ranks, and rounds to T after each addition.
template <typename T>
void sum_values(at::Tensor& sums, const at::Tensor& gathered) {
  T* const to = sums.mutable_data_ptr<T>();
  const T* from = gathered.const_data_ptr<T>();
  const int64_t numel = sums.numel();
  std::copy_n(from, numel, to);
  for (const T* end = from + gathered.numel(); (from += numel) < end;) {
    for (int64_t i = 0; i < numel; ++i) to[i] = to[i] + from[i];
  }
}

}  // namespace

Peers find_peers(c10::string_view group_name, c10::string_view layer) {
  Peers peers{nullptr, std::string(layer)};
  if (group_name.empty()) return peers;
  try {
    peers.group = c10d::resolve_process_group(std::string(group_name));
  } catch (const std::exception&) {
    TORCH_CHECK(false, "apex sync batch norm: no process group is registered as '", group_name,
                "'; it was destroyed, or was not created on this rank. Create it on every rank, "
                "and pass its group_name.");
  }
  if (peers.group->getSize() == 1) peers.group.reset();
  return peers;
}

BeforeExchange::BeforeExchange(const Peers& peers, Direction direction)
    : peers_(peers), direction_(direction), exceptions_(std::uncaught_exceptions()) {}

BeforeExchange::~BeforeExchange() {
  if (!peers_ || std::uncaught_exceptions() == exceptions_) return;
  announce_failure(*peers_.group, "the arguments of " + describe(direction_, peers_.layer));
}

at::Tensor all_gather(const Peers& peers, const at::Tensor& local, Direction direction,
                      int64_t channels) {
  if (talks_over_gloo(*peers.group, local))
    return gather_with_headers(peers, local, direction, channels);
  const at::Tensor gathered = at::empty({peers.group->getSize() * local.numel()}, local.options());
  const std::string what = describe(peers, direction, channels);
  run_collective(what, *peers.group, [&] {
    return issue_all_gather(what, *peers.group, gathered, local, Enqueue::kOnCurrentStream);
  });
  return gathered;
}

void all_reduce(const Peers& peers, at::Tensor& tensor, Direction direction, int64_t channels) {
  if (direction != Direction::kForward) {  // the module announces a forward
    announce_collective(4 * channels + (direction == Direction::kBackward    ? 1
                                        : tensor.scalar_type() == at::kFloat ? 2
                                                                             : 3));
  }
  const int64_t ranks = peers.group->getSize();
  if (talks_over_gloo(*peers.group, tensor)) {
    const bool sums = tensor.nbytes() * static_cast<size_t>(ranks) <= kMaxGatheredBytes;
    const at::Tensor gathered = gather_with_headers(peers, tensor, direction, channels, sums);
    if (sums) {
      AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, tensor.scalar_type(), "all_reduce",
                                      [&] { sum_values<scalar_t>(tensor, gathered); });
      return;
    }
  }
  const std::string what = describe(peers, direction, channels);
  run_collective(what, *peers.group, [&] {
    return issue_all_reduce(what, *peers.group, tensor, c10d::ReduceOp::SUM,
                            Enqueue::kOnCurrentStream);
  });
}

at::Tensor all_reduce_sum(const at::Tensor& tensor, c10::string_view group_name,
                          c10::string_view layer) {
  at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
  if (const Peers peers = find_peers(group_name, layer)) {
    at::Tensor flat = sum.view({-1});
    all_reduce(peers, flat, Direction::kSecondDerivative, sum.numel());
  }
  return sum;
}

}  // namespace apex::parallel::detail
