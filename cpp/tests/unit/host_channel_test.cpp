// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_channel.h"

#include <gtest/gtest.h>

#include <support/host_threads.h>

#include <sys/resource.h>
#include <sys/stat.h>

#include <ATen/Context.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <apex/error.h>

/// The protocol with ranks as threads that share memory, so that ThreadSanitizer covers all of it.
/// Oracles: float64 sums in rank order, and the same bits on every rank.

namespace apex::parallel {
namespace {

using Op = c10d::ReduceOp::RedOpType;
using std::chrono::milliseconds;
using testing::Channels;
using testing::expect_no_errors;
using testing::on_ranks;

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

bool same_bits(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         (left.numel() == 0 ||
          std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0);
}

at::Tensor values(int64_t numel, at::ScalarType dtype, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  if (at::isIntegralType(dtype, false))
    return at::randint(0, 20, {numel}, generator, at::TensorOptions(at::kLong)).to(dtype);
  if (at::isComplexType(dtype)) {
    return at::view_as_complex(at::randn({numel, 2}, generator, at::TensorOptions(at::kDouble)))
        .to(dtype);
  }
  return at::randn({numel}, generator, at::TensorOptions(at::kDouble)).to(dtype);
}

/// The quotient, rounded once to the dtype of `sum`.
at::Tensor divided(const at::Tensor& sum, size_t by) {
  const at::Tensor real = sum.is_complex() ? at::view_as_real(sum) : sum;
  const at::Tensor quotient =
      real.to(at::kDouble).div(static_cast<double>(by)).to(real.scalar_type());
  return sum.is_complex() ? at::view_as_complex(quotient) : quotient;
}

/// The exact result: float64, in rank order, rounded once for 16-bit dtypes.
at::Tensor reference(const std::vector<at::Tensor>& inputs, Op op) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  if (dtype == at::kFloat || dtype == at::kDouble || at::isComplexType(dtype)) {
    // These dtypes use the same arithmetic.
    at::Tensor sum = inputs[0].clone();
    for (size_t rank = 1; rank < inputs.size(); ++rank) {
      if (op == Op::MAX) sum = at::maximum(sum, inputs[rank]);
      if (op == Op::MIN) sum = at::minimum(sum, inputs[rank]);
      if (op == Op::SUM || op == Op::AVG) sum = sum + inputs[rank];
      if (op == Op::PRODUCT) sum = sum * inputs[rank];
    }
    return op == Op::AVG ? divided(sum, inputs.size()) : sum;
  }
  const bool wide = at::isIntegralType(dtype, false);
  at::Tensor sum = inputs[0].to(wide ? at::kLong : at::kFloat);
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const at::Tensor more = inputs[rank].to(sum.scalar_type());
    if (op == Op::MAX) sum = at::maximum(sum, more);
    if (op == Op::MIN) sum = at::minimum(sum, more);
    if (op == Op::SUM || op == Op::AVG) sum = sum + more;
    if (op == Op::PRODUCT) sum = sum * more;
    if (op == Op::BAND) sum = sum.bitwise_and(more);
    if (op == Op::BOR) sum = sum.bitwise_or(more);
    if (op == Op::BXOR) sum = sum.bitwise_xor(more);
  }
  if (op == Op::AVG) sum = divided(sum, inputs.size());
  return sum.to(dtype);
}

/// A collective of a random program: the same on every rank except for `in_shared`.
struct Case {
  enum Kind { kAllReduce, kBroadcast, kAllGather, kReduceScatter } kind = kAllReduce;
  Op op = Op::SUM;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  int root = 0;
  uint64_t seed = 0;
};

Case draw(std::mt19937_64& random, int ranks) {
  constexpr at::ScalarType kTypes[] = {
      at::kFloat, at::kDouble, at::kHalf,  at::kBFloat16,     at::kLong,         at::kInt,
      at::kChar,  at::kByte,   at::kShort, at::kComplexFloat, at::kComplexDouble};
  constexpr Op kOps[] = {Op::SUM,     Op::AVG,  Op::MAX, Op::MIN,
                         Op::PRODUCT, Op::BAND, Op::BOR, Op::BXOR};
  constexpr int64_t kSizes[] = {0, 1, 2, 7, 63, 64, 65, 1000, 4096, 4097, 8191, 20000, 70001};
  Case one;
  const uint64_t kind = random() % 6;
  one.kind = kind < 3 ? Case::kAllReduce : static_cast<Case::Kind>(kind - 2);
  one.dtype = kTypes[random() % std::size(kTypes)];
  do {
    one.op = kOps[random() % std::size(kOps)];
  } while (!HostChannel::can_all_reduce(at::empty({0}, one.dtype), one.op));
  one.numel = random() % 3 == 0 ? static_cast<int64_t>(random() % 9000)
                                : kSizes[random() % std::size(kSizes)];
  one.root = static_cast<int>(random() % ranks);
  one.seed = random() % 1000;
  return one;
}

at::Tensor input_of(const Case& one, int rank) {
  return values(one.numel, one.dtype, one.seed * 16 + static_cast<uint64_t>(rank));
}

/// Issues the collective; the returned function waits for it and checks the result.
std::function<void()> issue(HostChannel& channel, const Case& one, int rank, int ranks,
                            bool in_shared) {
  const std::string what = "case of seed " + std::to_string(one.seed);
  std::vector<at::Tensor> inputs;
  for (int peer = 0; peer < ranks; ++peer) inputs.push_back(input_of(one, peer));
  at::Tensor mine = inputs[rank].clone();
  if (in_shared && !mine.is_complex()) {
    at::Tensor shared = channel.allocate(one.numel, mine.options());
    shared.copy_(mine);
    mine = shared;
  }
  switch (one.kind) {
    case Case::kAllReduce: {
      auto work = channel.all_reduce(what, mine, one.op);
      return [=] {
        work->wait();
        require(same_bits(mine, reference(inputs, one.op)), what + ": another sum");
      };
    }
    case Case::kBroadcast: {
      auto work = channel.broadcast(what, mine, one.root);
      return [=] {
        work->wait();
        require(same_bits(mine, inputs[one.root]), what + ": not the root's");
      };
    }
    case Case::kAllGather: {
      const at::Tensor all = at::empty({ranks * one.numel}, mine.options());
      auto work = channel.all_gather(what, {all}, mine);
      return [=] {
        work->wait();
        require(same_bits(all, at::cat(inputs)), what + ": not what the ranks gave");
      };
    }
    case Case::kReduceScatter: {
      // Each rank gets the share of its index.
      const at::Tensor out = at::empty_like(mine);
      auto work = channel.reduce_scatter(what, out, {mine.repeat({ranks})}, one.op);
      return [=] {
        work->wait();
        require(same_bits(out, reference(inputs, one.op)), what + ": another sum");
      };
    }
  }
  return {};
}

/// Issues up to `ahead` collectives before waiting for the first.
void run_program(HostChannel& channel, int rank, int ranks, uint64_t seed, int count,
                 size_t ahead) {
  std::mt19937_64 program(seed);
  std::mt19937_64 own(seed * 31 + static_cast<uint64_t>(rank));
  std::vector<std::function<void()>> waits;
  for (int i = 0; i < count; ++i) {
    const Case one = draw(program, ranks);
    waits.push_back(issue(channel, one, rank, ranks, own() % 2 == 0));
    if (own() % 5 == 0) std::this_thread::yield();
    if (waits.size() < ahead && i + 1 < count) continue;
    for (const auto& wait : waits) wait();
    waits.clear();
  }
}

class HostChannelPrograms : public ::testing::TestWithParam<std::tuple<int, size_t>> {};

TEST_P(HostChannelPrograms, EveryResultIsThatOfOneProcess) {
  const auto [ranks, ahead] = GetParam();
  const Channels channels = testing::connect_channels(ranks);
  const auto run = [&, among = ranks, before = ahead](int rank) {
    run_program(*channels[rank], rank, among, 7 * before + among, 1150, before);
  };
  expect_no_errors(on_ranks(ranks, run));
}

INSTANTIATE_TEST_SUITE_P(RanksAndAhead, HostChannelPrograms,
                         ::testing::Combine(::testing::Values(2, 3, 5),
                                            ::testing::Values(size_t{1}, size_t{4}, size_t{40})));

TEST(HostChannel, BitsOfAnElementDoNotDependOnWhereItLies) {
  const int ranks = 3;
  const Channels channels = testing::connect_channels(ranks);
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < ranks; ++rank) inputs.push_back(values(50000, at::kFloat, 90 + rank));
  const at::Tensor whole = reference(inputs, Op::AVG);
  expect_no_errors(on_ranks(ranks, [&](int rank) {
    for (const int64_t numel : {1, 100, 5000, 12345, 49000}) {
      for (const int64_t begin : {0, 1, 13, 999}) {
        at::Tensor part = inputs[rank].narrow(0, begin, numel).clone();
        channels[rank]->all_reduce("part", part, Op::AVG)->wait();
        require(same_bits(part, whole.narrow(0, begin, numel).clone()), "another sum");
      }
    }
  }));
}

TEST(HostChannel, NotANumberAndInfinityReachEveryRank) {
  const Channels channels = testing::connect_channels(2);
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  expect_no_errors(on_ranks(2, [&](int rank) {
    for (const Op op : {Op::SUM, Op::MAX, Op::MIN}) {
      for (int who = 0; who < 2; ++who) {
        at::Tensor tensor = at::ones({10000});
        if (rank == who) tensor.narrow(0, 77, 1).fill_(nan);
        if (rank == who) tensor.narrow(0, 9000, 1).fill_(inf);
        channels[rank]->all_reduce("flags", tensor, op)->wait();
        require(tensor.isnan().sum().item<int64_t>() == 1, "not a number was lost");
        if (op != Op::MIN) require(std::isinf(tensor[9000].item<float>()), "infinity was lost");
      }
    }
  }));
}

TEST(HostChannel, SixteenBitsAreSummedInFloatAndRoundedOnce) {
  const Channels channels = testing::connect_channels(2);
  expect_no_errors(on_ranks(2, [&](int rank) {
    at::Tensor half = at::full({9000}, 40000.0, at::kHalf);
    channels[rank]->all_reduce("half", half, Op::AVG)->wait();
    require(half.to(at::kFloat).eq(40000.0).all().item<bool>(), "the sum was rounded to half");
  }));
}

// Oracle: the sums of a rank in the default floating-point mode. Every rank sums small messages
// itself, and its part of a large one.
TEST(HostChannel, RankThatFlushesOrRoundsUpward_SumsAsTheOthersDo) {
  const int ranks = 3;
  const Channels channels = testing::connect_channels(ranks);
  for (const bool flushes : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const int64_t numel : {5, 300000}) {
        std::vector<at::Tensor> inputs;
        for (int rank = 0; rank < ranks; ++rank) {
          const double scale = flushes ? (dtype == at::kDouble ? 1e-310 : 1e-39) : 1.0;
          inputs.push_back((at::rand({numel}, at::kDouble) * scale).to(dtype));
        }
        std::vector<at::Tensor> sums;
        for (const at::Tensor& input : inputs) sums.push_back(input.clone());
        expect_no_errors(on_ranks(ranks, [&](int rank) {
          if (rank == 1 && flushes) at::globalContext().setFlushDenormal(true);
          if (rank == 1 && !flushes) std::fesetround(FE_UPWARD);
          channels[rank]->all_reduce("sum", sums[rank], Op::AVG)->wait();
        }));
        for (int rank = 0; rank < ranks; ++rank)
          EXPECT_TRUE(same_bits(sums[rank], reference(inputs, Op::AVG))) << dtype << ' ' << rank;
      }
    }
  }
}

// Hazard: each rank waits for a collective of one channel, which the other rank runs only after one
// of the other channel.
TEST(HostChannel, ManyInTwoChannels_IssuedInAnotherOrder_Complete) {
  const int ranks = 2, count = 700;
  const Channels first = testing::connect_channels(ranks),
                 second = testing::connect_channels(ranks);
  expect_no_errors(on_ranks(ranks, [&](int rank) {
    std::vector<at::Tensor> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (const bool other : {false, true}) {
      HostChannel& channel = *(other == (rank == 0) ? first : second)[rank];
      for (int i = 0; i < count; ++i) {
        // Every third message is summed by parts.
        tensors.push_back(at::full({i % 3 == 0 ? 9000 : 4}, i + rank, at::kDouble));
        works.push_back(channel.all_reduce("one of many", tensors.back(), Op::SUM));
      }
    }
    for (size_t i = 0; i < works.size(); ++i) {
      works[i]->wait();
      const auto number = static_cast<int>(i) % count;
      require(tensors[i].eq(2 * number + 1).all().item<bool>(), "number " + std::to_string(i));
    }
  }));
}

TEST(HostChannel, WorkThatNobodyWaitsForHoldsNobodyUp) {
  const Channels channels = testing::connect_channels(3);
  expect_no_errors(on_ranks(3, [&](int rank) {
    for (int round = 0; round < 30; ++round) {
      at::Tensor forgotten = at::full({6000}, rank, at::kFloat);
      channels[rank]->all_reduce("forgotten", forgotten, Op::SUM);
      forgotten = at::Tensor();  // its memory stays alive for the peers
      at::Tensor next = at::full({6000}, rank + 1, at::kFloat);
      channels[rank]->all_reduce("next", next, Op::SUM)->wait();
      require(next.eq(6).all().item<bool>(), "the next sum");
    }
  }));
}

// The worker sums its part. Hazard: it waits for a look of a rank that makes no call.
TEST(HostChannel, RankThatComputesHoldsNobodyUp) {
  const Channels channels = testing::connect_channels(2);
  std::atomic<bool> over{false};
  expect_no_errors(on_ranks(2, [&](int rank) {
    std::vector<at::Tensor> sums;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 3; ++i) {
      sums.push_back(at::full({60000}, rank, at::kFloat));
      works.push_back(channels[rank]->all_reduce("sum", sums.back(), Op::SUM));
    }
    for (int i = 0; rank == 0 && i < 5000 && !over; ++i)
      std::this_thread::sleep_for(milliseconds(1));
    require(rank == 1 || over, "the other rank waits for this one");
    for (const auto& work : works) work->wait();
    over = true;
    for (const at::Tensor& sum : sums) require(sum.eq(1).all().item<bool>(), "the sum");
  }));
}

// Hazard: the thread that completes futures runs a callback that waits for a later future.
TEST(HostChannel, CallbackThatWaitsForAnotherFuture_GoesOn) {
  const Channels channels = testing::connect_channels(2);
  expect_no_errors(on_ranks(2, [&](int rank) {
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (int i = 0; i < 3; ++i) {
      const auto work = channels[rank]->all_reduce("sum", at::ones({5}), Op::SUM);
      futures.push_back(work->getFuture()->then(
          [&, rank](c10::ivalue::Future&) {
            const at::Tensor inner = at::ones({5});
            channels[rank]->all_reduce("sum", inner, Op::SUM)->getFuture()->wait();
            return c10::IValue(inner);
          },
          c10::TensorType::get()));
    }
    for (const auto& future : futures) {
      future->wait();
      require(future->value().toTensor().eq(2).all().item<bool>(), "the inner sum");
    }
  }));
}

TEST(HostChannel, MessageInSharedMemoryIsNotCopied) {
  const Channels channels = testing::connect_channels(2);
  expect_no_errors(on_ranks(2, [&](int rank) {
    const at::Tensor bucket = channels[rank]->allocate(100000, at::kFloat);
    require(bucket.eq(0).all().item<bool>(), "it is not zeroed");
    for (int step = 0; step < 20; ++step) {
      bucket.fill_(rank + step);
      channels[rank]->all_reduce("bucket", bucket, Op::AVG)->wait();
      require(bucket.eq(step + 0.5).all().item<bool>(), "the average");
    }
  }));
}

TEST(HostChannel, TensorOutlivesItsChannel) {
  at::Tensor kept;
  {
    const Channels channels = testing::connect_channels(2);
    kept = channels[0]->allocate(5000, at::kFloat);
    kept.fill_(3);
  }
  EXPECT_TRUE(kept.eq(3).all().item<bool>());
}

// --- failures ---

struct Mismatch {
  const char* name;
  std::function<void(HostChannel&, int rank)> call;
  const char* said;
};

class HostChannelMismatch : public ::testing::TestWithParam<Mismatch> {};

TEST_P(HostChannelMismatch, EveryRankThrowsAndSaysWho) {
  const Channels channels = testing::connect_channels(2);
  const auto errors = on_ranks(2, [&](int rank) { GetParam().call(*channels[rank], rank); });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_NE(errors[rank].find("rank "), std::string::npos) << errors[rank];
    EXPECT_NE(errors[rank].find(GetParam().said), std::string::npos) << errors[rank];
  }
  // The failure is permanent.
  const auto again = on_ranks(
      2, [&](int rank) { channels[rank]->all_reduce("again", at::ones({1}), Op::SUM)->wait(); });
  for (const std::string& error : again)
    EXPECT_NE(error.find("an earlier collective of this group failed"), std::string::npos) << error;
}

INSTANTIATE_TEST_SUITE_P(
    All, HostChannelMismatch,
    ::testing::Values(
        Mismatch{"kind",
                 [](HostChannel& channel, int rank) {
                   const at::Tensor one = at::ones({5});
                   (rank == 0 ? channel.all_reduce("sum", one, Op::SUM)
                              : channel.broadcast("sum", one, 0))
                       ->wait();
                 },
                 "different collectives"},
        Mismatch{"name",
                 [](HostChannel& channel, int rank) {
                   channel.all_reduce(rank == 0 ? "this" : "that", at::ones({5}), Op::SUM)->wait();
                 },
                 "is in: that"},
        Mismatch{"size",
                 [](HostChannel& channel, int rank) {
                   channel.all_reduce("sum", at::ones({5 + rank}), Op::SUM)->wait();
                 },
                 "6"},
        Mismatch{"dtype",
                 [](HostChannel& channel, int rank) {
                   channel
                       .all_reduce("sum", at::ones({8}, rank == 0 ? at::kFloat : at::kInt), Op::SUM)
                       ->wait();
                 },
                 "Int"},
        Mismatch{"op",
                 [](HostChannel& channel, int rank) {
                   channel.all_reduce("sum", at::ones({8}), rank == 0 ? Op::SUM : Op::AVG)->wait();
                 },
                 "different collectives"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(HostChannel, RankThatLetsGoIsNamed) {
  Channels channels = testing::connect_channels(2);
  const auto errors = on_ranks(2, [&](int rank) {
    channels[rank]->all_reduce("first", at::ones({3}), Op::SUM)->wait();
    if (rank == 1) {
      channels[1].reset();
    } else {
      channels[0]->all_reduce("second", at::ones({3}), Op::SUM)->wait();
    }
  });
  EXPECT_NE(errors[0].find("rank 1 has left the group"), std::string::npos) << errors[0];
}

TEST(HostChannel, RankThatDoesNotComeIsNamedWhenTimeIsUp) {
  const Channels channels = testing::connect_channels(3, milliseconds(150));
  const auto errors = on_ranks(3, [&](int rank) {
    if (rank != 1) channels[rank]->all_reduce("sum", at::ones({3}), Op::SUM)->wait();
  });
  // The second rank may receive the report of the first.
  for (const int rank : {0, 2}) {
    const bool named = errors[rank].find("waited for rank 1 longer than the timeout of 150 ms") !=
                           std::string::npos ||
                       errors[rank].find("reports that a collective") != std::string::npos;
    EXPECT_TRUE(named) << errors[rank];
  }
}

TEST(HostChannel, WaitEndsAtItsOwnTime) {
  const Channels channels = testing::connect_channels(2);
  auto work = channels[0]->all_reduce("sum", at::ones({3}), Op::SUM);
  EXPECT_FALSE(work->isCompleted());
  EXPECT_THROW(work->wait(milliseconds(30)), Error);
  auto other = channels[1]->all_reduce("sum", at::ones({3}), Op::SUM);
  EXPECT_TRUE(other->wait());
  EXPECT_TRUE(work->wait());  // waiting twice is allowed
  EXPECT_TRUE(work->isCompleted());
}

// --- memory ---

TEST(HostMemory, FreedMemoryIsUsedAgain) {
  const auto memory = HostMemory::create(size_t{1} << 30, 0);
  std::vector<std::shared_ptr<char>> held;
  for (int i = 0; i < 20; ++i) held.push_back(memory->allocate(size_t{3} << 20));
  char* const first = held.front().get();
  held.clear();
  EXPECT_EQ(memory->allocate(size_t{50} << 20).get(), first);  // the gaps were merged
}

TEST(HostMemory, Zeroed_IsZero_AndNewMemoryIsNotTakenBeforeItIsWritten) {
  const auto memory = HostMemory::create(size_t{1} << 30, 0);
  const size_t bytes = size_t{30} << 20;
  const auto taken = [&] {
    struct stat status{};
    EXPECT_EQ(::fstat(memory->file().fd, &status), 0);
    return static_cast<size_t>(status.st_blocks) * 512;
  };
  for (const bool is_new : {true, false}) {
    const auto data = memory->allocate_zeroed(bytes);
    if (is_new) {
      EXPECT_LT(taken(), bytes / 4);
    }
    EXPECT_TRUE(std::all_of(data.get(), data.get() + bytes, [](char one) { return one == 0; }));
    std::memset(data.get(), 1, bytes);
  }
  // Half of it was never used.
  const auto data = memory->allocate_zeroed(2 * bytes);
  EXPECT_TRUE(std::all_of(data.get(), data.get() + 2 * bytes, [](char one) { return one == 0; }));
}

TEST(HostMemory, Full_Throws) {
  const auto memory = HostMemory::create(1, 0);
  const auto most = memory->allocate((size_t{2} << 20) - 64);
  EXPECT_THROW(memory->allocate(1), Error);
}

TEST(HostMemory, LargerThanTheLimitOfFiles_ThrowsBeforeASignalEndsTheProcess) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(HostMemory::create(size_t{1} << 30, 0), Error);
  ::setrlimit(RLIMIT_FSIZE, &before);
}

TEST(HostMemory, PiecesDoNotOverlap) {
  const auto memory = HostMemory::create(size_t{1} << 30, 0);
  std::mt19937_64 random(3);
  struct Piece {
    std::shared_ptr<char> data;
    size_t bytes;
    char mark;
  };
  std::vector<Piece> pieces;
  for (int i = 0; i < 3000; ++i) {
    if (!pieces.empty() && random() % 2 == 0) {
      const size_t which = random() % pieces.size();
      const Piece& piece = pieces[which];
      for (size_t at = 0; at < piece.bytes; at += 997) ASSERT_EQ(piece.data.get()[at], piece.mark);
      ASSERT_EQ(piece.data.get()[piece.bytes - 1], piece.mark);
      pieces.erase(pieces.begin() + static_cast<int64_t>(which));
      continue;
    }
    Piece piece;
    piece.bytes = 1 + random() % (random() % 8 == 0 ? 3000000 : 3000);
    piece.data = memory->allocate(piece.bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(piece.data.get()) % 64, 0U);
    piece.mark = static_cast<char>(i);
    std::memset(piece.data.get(), piece.mark, piece.bytes);
    pieces.push_back(std::move(piece));
  }
}

}  // namespace
}  // namespace apex::parallel
