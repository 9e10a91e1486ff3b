// SPDX-License-Identifier: BSD-3-Clause
#include "comm/host_hierarchy.h"

#include <gtest/gtest.h>

#include <ATen/Parallel.h>

#include <support/host_messages.h>
#include <support/host_threads.h>
#include <support/thread_backend.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/endings.h"

/// Ranks of several hosts as threads. The ranks of a host share memory, and columns use the tests'
/// backend. So ThreadSanitizer covers everything, and the network can be late, out of order or
/// down. Oracle: support/host_messages.h. For ranks as processes see host_hierarchy_test.cpp.

namespace apex::parallel {
namespace {

using testing::check;
using testing::expect_no_errors;
using testing::HostMessage;
using testing::on_ranks;
using testing::Places;
using testing::ThreadBackendControl;
using testing::values;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// All ranks of all hosts.
class Job {
 public:
  explicit Job(const Places& of_ranks) : places(of_ranks) {
    std::vector<std::string> names;
    for (const int host : places) names.push_back(std::to_string(host));
    const HostLayout layout = lay_out(names, 0);
    std::vector<HierarchyLinks> links(places.size());
    for (const std::vector<int>& host : layout.hosts) {
      if (host.size() == 1) continue;
      const auto here = static_cast<int>(host.size());
      const auto sums = testing::connect_channels(here), results = testing::connect_channels(here);
      for (size_t place = 0; place < host.size(); ++place) {
        links[host[place]].sums = sums[place];
        links[host[place]].results = results[place];
      }
    }
    const auto hosts = static_cast<int>(layout.hosts.size());
    for (int column = 0; column < layout.columns; ++column) {
      exchanges.push_back(ThreadBackendControl::create(hosts));
      if (hosts > 2) gathers.push_back(ThreadBackendControl::create(hosts));
      for (int host = 0; host < hosts; ++host) {
        HierarchyLinks& mine = links[layout.hosts[host][column]];
        const auto connect = [host](const auto& control) {
          return testing::make_thread_group(host, control)->getBackend(at::kCPU);
        };
        mine.exchange = connect(exchanges.back());
        if (hosts > 2) mine.gather = connect(gathers.back());
      }
    }
    for (int rank = 0; rank < size(); ++rank)
      ranks.push_back(std::make_shared<HostHierarchy>(lay_out(names, rank), links[rank]));
  }
  ~Job() {
    ranks.clear();
    finish_dropped_groups();
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int size() const { return static_cast<int>(places.size()); }

  at::Tensor message_of(const HostMessage& one, int rank) const {
    const at::Tensor mine = values(one, rank);
    if (!one.in_shared || at::isComplexType(one.dtype)) return mine;
    at::Tensor shared = ranks[rank]->allocate(one.numel, mine.options());
    shared.copy_(mine);
    return shared;
  }

  const Places places;
  std::vector<std::shared_ptr<HostHierarchy>> ranks;
  /// The network, by column.
  std::vector<std::shared_ptr<ThreadBackendControl>> exchanges, gathers;
};

/// A message large enough to use every stage.
HostMessage large(uint64_t seed, bool in_shared = true) {
  HostMessage one;
  one.numel = 40009;
  one.seed = seed;
  one.in_shared = in_shared;
  return one;
}

class HostHierarchyThreads : public ::testing::TestWithParam<Places> {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    at::ones({10}).sum();
  }
};

TEST_P(HostHierarchyThreads, SumsAreThoseOfHostsInOrder_BitForBit) {
  const Job job(GetParam());
  expect_no_errors(on_ranks(job.size(), [&](int rank) {
    HostHierarchy& hierarchy = *job.ranks[rank];
    std::mt19937_64 program(3), own(100 + static_cast<uint64_t>(rank));
    for (int round = 0; round < 20; ++round) {
      std::vector<HostMessage> cases;
      std::vector<at::Tensor> messages;
      std::vector<WorkPtr> works;
      for (auto left = 1 + program() % 6; left > 0; --left) {
        HostMessage one = testing::draw(program, hierarchy.averages());
        one.in_shared = own() % 2 == 0;
        cases.push_back(one);
        messages.push_back(job.message_of(one, rank));
        works.push_back(hierarchy.all_reduce("a message", messages.back(), one.op));
        if (own() % 4 == 0) std::this_thread::yield();
      }
      for (size_t i = 0; i < works.size(); ++i) {
        works[i]->wait();
        check(messages[i], cases[i], job.places);
      }
    }
  }));
}

// Hazard: messages pass the stages in order of arrival, which differs between ranks.
TEST_P(HostHierarchyThreads, MessagesThatArriveInReverse_AreSummedAllTheSame) {
  const Job job(GetParam());
  constexpr uint64_t kMessages = 8;
  for (const auto& network : {job.exchanges, job.gathers}) {
    for (const auto& control : network) control->hold_all();
  }
  std::thread arrivals([&] {
    for (const auto& network : {job.exchanges, job.gathers}) {
      for (const auto& control : network) {
        control->wait_until_issued(kMessages - 1);
        for (uint64_t seq = kMessages; seq-- > 0;) control->release(seq);
      }
    }
  });
  const auto errors = on_ranks(job.size(), [&](int rank) {
    std::vector<at::Tensor> messages;
    std::vector<WorkPtr> works;
    for (uint64_t i = 0; i < kMessages; ++i) {
      messages.push_back(job.message_of(large(i, i % 2 == 0), rank));
      works.push_back(
          job.ranks[rank]->all_reduce("a message", messages.back(), c10d::ReduceOp::SUM));
    }
    for (uint64_t i = 0; i < kMessages; ++i) {
      works[i]->wait();
      check(messages[i], large(i), job.places);
    }
  });
  arrivals.join();
  expect_no_errors(errors);
  for (const auto& control : job.exchanges) {
    EXPECT_EQ(control->completed().front(), kMessages - 1) << "they have arrived in order";
  }
}

TEST_P(HostHierarchyThreads, MoreMessagesThanAChannelHolds_OfARankThatLooksOnlyAtTheEnd) {
  const Job job(GetParam());
  const int64_t size = job.size();
  expect_no_errors(on_ranks(job.size(), [&](int rank) {
    std::vector<at::Tensor> messages;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 400; ++i) {
      messages.push_back(at::full({100}, rank + i, at::kLong));
      works.push_back(job.ranks[rank]->all_reduce("of many", messages.back(), c10d::ReduceOp::SUM));
    }
    for (int i = 399; i >= 0; --i) {
      works[i]->wait();
      if (!messages[i].eq(size * (size - 1) / 2 + size * i).all().item<bool>())
        throw std::runtime_error("another sum");
    }
  }));
}

// Autograd's threads issue collectives that the main thread waits for.
TEST_P(HostHierarchyThreads, OneThreadIssuesAndAnotherWaits) {
  const Job job(GetParam());
  expect_no_errors(on_ranks(job.size(), [&](int rank) {
    struct Issued {
      HostMessage one;
      at::Tensor message;
      WorkPtr work;
    };
    std::mutex mutex;
    std::condition_variable more;
    std::deque<Issued> queue;
    constexpr uint64_t kMessages = 20;
    std::thread issuer([&] {
      for (uint64_t i = 0; i < kMessages; ++i) {
        Issued next{large(i, i % 2 == 0), {}, {}};
        next.message = job.message_of(next.one, rank);
        next.work = job.ranks[rank]->all_reduce("a message", next.message, c10d::ReduceOp::SUM);
        const std::lock_guard<std::mutex> lock(mutex);
        queue.push_back(std::move(next));
        more.notify_one();
      }
    });
    std::string error;
    for (uint64_t i = 0; i < kMessages; ++i) {
      Issued next;
      {
        std::unique_lock<std::mutex> lock(mutex);
        more.wait(lock, [&] { return !queue.empty(); });
        next = std::move(queue.front());
        queue.pop_front();
      }
      try {
        next.work->isCompleted();
        next.work->wait();
        check(next.message, next.one, job.places);
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
    }
    issuer.join();
    if (!error.empty()) throw std::runtime_error(error);
  }));
}

TEST_P(HostHierarchyThreads, RankThatLetsGoAtOnce_HoldsNobodyUp) {
  for (int gone = 0; gone < static_cast<int>(GetParam().size()); ++gone) {
    Job job(GetParam());
    expect_no_errors(on_ranks(job.size(), [&](int rank) {
      at::Tensor message = job.message_of(large(5), rank);
      WorkPtr work = job.ranks[rank]->all_reduce("the last", message, c10d::ReduceOp::SUM);
      if (rank == gone) {
        work.reset();
        job.ranks[rank].reset();
      } else {
        work->wait();
        check(message, large(5), job.places);
      }
    }));
  }
}

TEST_P(HostHierarchyThreads, NetworkThatFails_IsWhatEveryRankThrows) {
  const Job job(GetParam());
  for (const auto& control : job.exchanges) control->fail(1, "the cable is cut");
  const auto train = [&](int rank) {
    for (uint64_t i = 0; i < 3; ++i) {
      at::Tensor message = job.message_of(large(i), rank);
      job.ranks[rank]->all_reduce("a message", message, c10d::ReduceOp::SUM)->wait();
      check(message, large(i), job.places);
      if (i > 0) throw std::runtime_error("it has come all the same");
    }
  };
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (const std::string& error : on_ranks(job.size(), train))
      EXPECT_NE(error.find("the cable is cut"), std::string::npos) << error;
  }
}

TEST_P(HostHierarchyThreads, RankThatGivesUpWhileOthersWait_IsHeard) {
  for (int who = 0; who < static_cast<int>(GetParam().size()); ++who) {
    const Job job(GetParam());
    const auto errors = on_ranks(job.size(), [&](int rank) {
      at::Tensor message = job.message_of(large(1), rank);
      if (rank == who) {
        job.ranks[rank]->give_up("out of memory");
        // Its process exits.
        for (const auto& network : {job.exchanges, job.gathers}) {
          for (const auto& control : network) control->abort("connection closed by peer");
        }
      }
      job.ranks[rank]->all_reduce("a message", message, c10d::ReduceOp::SUM)->wait();
    });
    for (const std::string& error : errors) {
      EXPECT_TRUE(error.find("out of memory") != std::string::npos ||
                  error.find("closed by peer") != std::string::npos)
          << error;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, HostHierarchyThreads,
                         ::testing::Values(Places{0, 0, 1, 1}, Places{0, 0, 0, 1},
                                           Places{0, 1, 2, 2}, Places{0, 1, 0, 2, 1, 2}),
                         [](const auto& info) {
                           std::string name;
                           for (const int host : info.param) name += std::to_string(host);
                           return name;
                         });

}  // namespace
}  // namespace apex::parallel
