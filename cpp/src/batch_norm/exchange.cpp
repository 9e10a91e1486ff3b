// SPDX-License-Identifier: BSD-3-Clause
#include "batch_norm/exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <apex/error.h>

#include "comm/announcer.h"
#include "comm/collectives.h"
#include "comm/failure_report.h"
#include "distributed/backends.h"
#include "torch_version.h"
#include "transport/separate_group.h"

namespace apex::parallel::detail {

namespace {

// Note [Ranks in different layers]
//
// The collectives of a layer are matched by their order. A rank that has skipped or repeated one,
// or is in backward while others are in forward, sends something else than they expect. If that is
// larger, Gloo ends their process by an exception on a thread of its own; if it is smaller or
// equal, values are mixed without a word. So a message begins with a header that says which
// exchange it is, and every rank reads all of them before any value. And it is received into more
// room than it needs, which an all-to-all allows, as each rank gives the lengths that it expects
// itself. (With as many values for everybody it is the same as an all-gather; and a rank sends to
// all at once, where an all-gather passes messages round a ring.) In shared memory it is one,
// and the first message has the same length for every layer, so that headers can be read when the
// layers differ; what does not fit follows in a second one.

struct Header {
  static constexpr size_t kNameLength = 40;
  int64_t bytes = 0;  ///< that follow
  int64_t channels = 0;
  Direction direction = Direction::kForward;
  int32_t name_length = 0;
  char name[kNameLength] = {};  ///< the end of the layer's

  bool matches(const Header& other) const {
    return bytes == other.bytes && channels == other.channels && direction == other.direction &&
           (name_length == 0 || other.name_length == 0 || layer() == other.layer());
  }
  std::string layer() const { return {name, static_cast<size_t>(name_length)}; }
};
static_assert(sizeof(Header) == 64, "what follows is aligned");

/// For a message of any rank. Pages that nobody writes cost nothing.
constexpr int64_t kRoom = int64_t{1} << 20;

/// From this size on, of all ranks together, the backend's own all-reduce is faster than to gather.
constexpr size_t kMaxGatheredBytes = size_t{1} << 20;

Header header_of(const Peers& peers, int64_t bytes, Direction direction, int64_t channels) {
  Header header;
  header.bytes = bytes;
  header.channels = channels;
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
                     ": the ranks are in different batch norms: ";
  for (size_t r = 0; r < headers.size(); ++r) {
    const Header& header = headers[r];
    text += (r == 0 ? "rank " : ", rank ") + std::to_string(r) + " in " +
            describe(header.direction, header.layer(), header.channels);
  }
  throw RankMismatch(
      text +
      ". Nothing was exchanged. Every rank has to run the same synchronized layers, forward and "
      "backward, in the same order, and with as many channels; a rank that runs a forward for "
      "itself "
      "does so in eval(), and with fewer batches than others under DistributedDataParallel.join()" +
      note_on_ranks(group));
}

bool talks_over_gloo(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  return tensor.is_cpu() && has_backend(group, at::kCPU) &&
         distributed::gloo_timeout(*group.getBackend(at::kCPU)).has_value();
}

/// Where the values of each rank are, by rank; as well aligned as their length allows.
struct Gathered {
  at::Tensor received;
  std::vector<const uint8_t*> values;
};

/// Of a message: `begin_of(rank)` says where the header of that rank is; its values are behind it.
/// @throws RankMismatch if the headers differ.
template <typename BeginOf>
Gathered read_message(const Peers& peers, const at::Tensor& received, BeginOf&& begin_of) {
  const int ranks = peers.group->getSize();
  const uint8_t* const from = received.const_data_ptr<uint8_t>();
  std::vector<Header> headers(static_cast<size_t>(ranks));
  Gathered gathered{received, {}};
  for (int rank = 0; rank < ranks; ++rank) {
    const uint8_t* const header = from + begin_of(rank);
    std::memcpy(&headers[rank], header, sizeof(Header));
    gathered.values.push_back(header + sizeof(Header));
  }
  refuse_different(*peers.group, headers);
  return gathered;
}

/// Of the first message in shared memory: a header, and the values of some 500 channels.
constexpr int64_t kFirstBytes = int64_t{8} << 10;

Gathered gather_in_memory(const Peers& peers, const at::Tensor& local, const Header& mine,
                          const std::string& waiting) {
  const int64_t ranks = peers.group->getSize();
  const auto gather = [&](const char* what, const at::Tensor& share) {
    at::Tensor received = at::empty({ranks * share.numel()}, at::kByte);
    wait_collective(issue_all_gather(what, *peers.group, received, share), waiting, *peers.group);
    return received;
  };
  const auto bytes = static_cast<int64_t>(local.nbytes());
  const bool fits = static_cast<int64_t>(sizeof(mine)) + bytes <= kFirstBytes;
  const at::Tensor share = at::zeros({kFirstBytes}, at::kByte);
  std::memcpy(share.mutable_data_ptr(), &mine, sizeof(mine));
  if (fits && bytes > 0) {
    std::memcpy(share.mutable_data_ptr<uint8_t>() + sizeof(mine), local.const_data_ptr(),
                static_cast<size_t>(bytes));
  }
  Gathered gathered = read_message(peers, gather("exchange of a SyncBatchNorm", share),
                                   [](int64_t rank) { return rank * kFirstBytes; });
  if (!fits) {
    gathered.received = gather("values of a SyncBatchNorm", local.view({-1}).view(at::kByte));
    for (int64_t rank = 0; rank < ranks; ++rank)
      gathered.values[rank] = gathered.received.const_data_ptr<uint8_t>() + rank * bytes;
  }
  return gathered;
}

/// With `announced`, the header says that this many bytes will follow, and `local` is empty.
Gathered gather_with_headers(const Peers& peers, const at::Tensor& local, Direction direction,
                             int64_t channels, int64_t announced = -1) {
  const int64_t ranks = peers.group->getSize();
  const auto bytes = static_cast<int64_t>(local.nbytes());
  const int64_t length = static_cast<int64_t>(sizeof(Header)) + bytes;
  const Header mine = header_of(peers, announced < 0 ? bytes : announced, direction, channels);
  const std::string waiting = describe(peers, direction, channels);
  const auto host = host_backend_of(*peers.group);
  if (host && host->shares_memory()) return gather_in_memory(peers, local, mine, waiting);
  if (length > kRoom && announced < 0) {  // the others may have less room
    gather_with_headers(peers, local.narrow(0, 0, 0), direction, channels, bytes);
  }
  const int64_t room = std::max(length, kRoom);
  const int rank_of_mine = peers.group->getRank();
  std::vector<int64_t> lengths(static_cast<size_t>(ranks), length),
      rooms(static_cast<size_t>(ranks), room);
  rooms[rank_of_mine] = length;  // Gloo demands it
  const auto begin_of = [&](int64_t rank) {
    return rank * room - (rank > rank_of_mine ? room - length : 0);
  };
  at::Tensor sent = at::empty({ranks * length}, at::kByte);
  at::Tensor received = at::empty({begin_of(ranks)}, at::kByte);
  uint8_t* to = sent.mutable_data_ptr<uint8_t>();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::memcpy(to + rank * length, &mine, sizeof(mine));
    std::memcpy(to + rank * length + sizeof(mine), local.const_data_ptr(),
                static_cast<size_t>(bytes));
  }
  // Without the layer, which a rank that only takes part under join() does not know.
  const auto work = issue_all_to_all(describe({}, direction, channels), *peers.group, received,
                                     sent, rooms, lengths);
  wait_collective(work, waiting, *peers.group);
  remember_processes(*peers.group);
  return read_message(peers, received, begin_of);
}

/// In the order of the ranks, rounded after each.
template <typename T>
void sum_values(at::Tensor& sums, const Gathered& gathered) {
  T* const to = sums.mutable_data_ptr<T>();
  const int64_t numel = sums.numel();
  std::memcpy(to, gathered.values[0], sums.nbytes());
  for (size_t rank = 1; rank < gathered.values.size(); ++rank) {
    const T* const from = reinterpret_cast<const T*>(gathered.values[rank]);
    for (int64_t i = 0; i < numel; ++i) to[i] = to[i] + from[i];
  }
}

}  // namespace

Peers find_peers(c10::string_view name) {
  Peers peers;
  if (name.empty()) return peers;
  std::string text(name);
  const size_t end = text.find('\n');
  if (end != std::string::npos) {
    peers.layer = text.substr(end + 1);
    text.resize(end);
  }
  try {
    peers.group = c10d::resolve_process_group(text);
  } catch (const std::exception&) {
    TORCH_CHECK(false, "apex sync batch norm: no process group is registered as '", text,
                "'; it was destroyed, or never made on this rank. Create it on every rank, and "
                "pass its group_name.");
  }
  if (peers.group->getSize() == 1) peers.group.reset();
  return peers;
}

BeforeExchange::BeforeExchange(const Peers& peers, Direction direction)
    : peers_(peers), direction_(direction), exceptions_(std::uncaught_exceptions()) {}

BeforeExchange::~BeforeExchange() {
  if (!peers_ || std::uncaught_exceptions() == exceptions_) return;
  refuse_call(*peers_.group, "the arguments of " + describe(direction_, peers_.layer));
}

at::Tensor all_gather(const Peers& peers, const at::Tensor& local, Direction direction,
                      int64_t channels) {
  const at::Tensor gathered = at::empty({peers.group->getSize() * local.numel()}, local.options());
  if (talks_over_gloo(*peers.group, local)) {
    auto* to = static_cast<uint8_t*>(gathered.mutable_data_ptr());
    const Gathered all = gather_with_headers(peers, local, direction, channels);
    for (const uint8_t* values : all.values) {
      std::memcpy(to, values, local.nbytes());
      to += local.nbytes();
    }
    return gathered;
  }
  const std::string what = describe(peers, direction, channels);
  run_collective(what, *peers.group, [&] {
    return issue_all_gather(what, *peers.group, gathered, local, Enqueue::kOnCurrentStream);
  });
  return gathered;
}

void all_reduce(const Peers& peers, at::Tensor& tensor, Direction direction, int64_t channels) {
  if (direction != Direction::kForward) {  // which its module announces
    announce_collective(4 * channels + (direction == Direction::kBackward    ? 1
                                        : tensor.scalar_type() == at::kFloat ? 2
                                                                             : 3));
  }
  const int64_t ranks = peers.group->getSize();
  const bool gloo = talks_over_gloo(*peers.group, tensor);
  if (gloo && tensor.nbytes() * static_cast<size_t>(ranks) > kMaxGatheredBytes) {
    gather_with_headers(peers, tensor.narrow(0, 0, 0), direction, channels,
                        static_cast<int64_t>(tensor.nbytes()));
  } else if (gloo) {
    const Gathered gathered = gather_with_headers(peers, tensor, direction, channels);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, tensor.scalar_type(), "all_reduce",
                                    [&] { sum_values<scalar_t>(tensor, gathered); });
    return;
  }
  const std::string what = describe(peers, direction, channels);
  run_collective(what, *peers.group, [&] {
    return issue_all_reduce(what, *peers.group, tensor, c10d::ReduceOp::SUM,
                            Enqueue::kOnCurrentStream);
  });
}

at::Tensor all_reduce_sum(const at::Tensor& tensor, c10::string_view name) {
  at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
  if (const Peers peers = find_peers(name)) {
    at::Tensor flat = sum.view({-1});
    all_reduce(peers, flat, Direction::kSecondDerivative, sum.numel());
  }
  return sum;
}

}  // namespace apex::parallel::detail
