// SPDX-License-Identifier: BSD-3-Clause
#include "support/host_steps.h"

#include "../../src/transport/host_hierarchy.cpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <apex/parallel/stall_report.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <random>
#include <string>

#include <support/counting_store.h>
#include <support/host_messages.h>

#include "comm/collectives.h"
#include "comm/separate_group.h"
#include "distributed/backends.h"
#include "endings.h"
#include "watch/process_state.h"
#include "watch/watched_group.h"

/// Ranks as processes over Gloo that claim to be on several hosts. Oracle: support/host_messages.h.

namespace apex::parallel {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using testing::check;
using testing::expect_done;
using testing::hit_at;
using testing::HostMessage;
using testing::Outcome;
using testing::Places;
using testing::values;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct Rank {
  int rank = 0;
  Places places;
  fs::path folder;  ///< of this run
  GroupPtr group;
  c10::intrusive_ptr<HostBackend> hierarchy;  ///< null: it does not sum by host
};

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

/// A temporary folder for the store of one run.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "apex-hosts-XXXXXX").string();
    require(::mkdtemp(name.data()) != nullptr, "no folder");
    path = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  fs::path path;
};

/// A group as a script creates it, over Gloo.
GroupPtr make_group(int rank, int size, const c10::intrusive_ptr<c10d::Store>& store,
                    milliseconds timeout) {
  distributed::BackendRequest request;
  request.store = store;
  request.rank = rank;
  request.size = size;
  request.timeout = timeout;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::GLOO,
                    distributed::make_gloo_backend(request));
  group->setGroupName("base");
  return group;
}

c10::intrusive_ptr<testing::CountingStore> in_file(const fs::path& file, size_t size) {
  return c10::make_intrusive<testing::CountingStore>(file.string(), static_cast<int>(size));
}

Rank connect(int rank, const Places& places, const fs::path& folder, milliseconds timeout) {
  pretend_host("host" + std::to_string(places[rank]));
  c10d::TCPStoreOptions options;
  while (!fs::exists(folder / "port")) ::poll(nullptr, 0, 1);
  std::ifstream(folder / "port") >> options.port;
  const auto base = make_group(rank, static_cast<int>(places.size()),
                               c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options), timeout);
  Rank self{rank, places, folder, make_separate_group(base, "own"), nullptr};
  const auto backend = host_backend_of(*self.group);
  if (backend->sums_by_host()) self.hierarchy = backend;
  // The store's server asks the resolver for the name of each connection, which may take seconds.
  const auto board = watched(*self.group)->board;
  for (const auto now = Board::Clock::now(); !board->answered_since(now); ::poll(nullptr, 0, 1))
    board->look_if_older(milliseconds(0));
  base->barrier()->wait();
  return self;
}

/// Runs the ranks. Calls `body` in each process; its exception becomes the rank's outcome.
std::vector<Outcome> run(const Places& places, const std::function<void(Rank&)>& body,
                         const std::function<void(pid_t)>& on_stop = {},
                         const std::function<void(int)>& before = {},
                         milliseconds timeout = seconds(30)) {
  const Folder folder;
  const auto ranks = places.size();
  std::vector<pid_t> children;
  std::vector<int> pipes;
  const auto until = std::chrono::steady_clock::now() + seconds(150);
  for (size_t rank = 0; rank < ranks; ++rank) {
    int ends[2];
    require(::pipe2(ends, O_CLOEXEC) == 0, "no pipe");
    children.push_back(testing::fork_rank(ends[1], [&] {
      if (before) before(static_cast<int>(rank));
      Rank self = connect(static_cast<int>(rank), places, folder.path, timeout);
      body(self);
      self = Rank();
      finish_dropped_groups();
    }));
    ::close(ends[1]);
    pipes.push_back(ends[0]);
  }
  // After the forks: a child would inherit the state of the server's threads.
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore server("127.0.0.1", options);  // survives all ranks
  std::ofstream(folder.path / "part") << server.getPort();
  fs::rename(folder.path / "part", folder.path / "port");
  return testing::wait_for_ranks(children, pipes, until, on_stop);
}

// --- messages ---

at::Tensor message_of(Rank& self, const HostMessage& one) {
  const at::Tensor mine = values(one, self.rank);
  if (!one.in_shared || at::isComplexType(one.dtype)) return mine;
  at::Tensor shared = self.hierarchy->allocateTensor(one.numel, mine.options());
  shared.copy_(mine);
  return shared;
}

/// Messages of every kind, several in flight; the same on every rank except for their memory.
void random_program(Rank& self, uint64_t seed, int rounds) {
  std::mt19937_64 random(seed);
  std::mt19937_64 alone(seed * 100 + static_cast<uint64_t>(self.rank));
  for (int round = 0; round < rounds; ++round) {
    std::vector<HostMessage> cases;
    std::vector<at::Tensor> messages;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    const auto in_flight = 1 + random() % 6;
    for (size_t i = 0; i < in_flight; ++i) {
      HostMessage one = testing::draw(random);
      one.in_shared = alone() % 2 == 0;
      const std::string what = "message " + std::to_string(i);
      cases.push_back(one);
      messages.push_back(message_of(self, one));
      works.push_back(call_collective(what, *self.group, [&] {
        return self.hierarchy->all_reduce(what, messages.back(), one.op);
      }));
      if (alone() % 4 == 0) ::poll(nullptr, 0, static_cast<int>(alone() % 5));
    }
    for (size_t i = 0; i < works.size(); ++i) {
      wait_collective(works[i], "message " + std::to_string(i), *self.group);
      require(works[i]->isCompleted(), "waited for, and not complete");
      check(messages[i], cases[i], self.places);
    }
  }
}

class HostHierarchyTest : public ::testing::TestWithParam<Places> {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    at::ones({10}).sum();  // starts what starts once, before forking
  }
};

TEST_P(HostHierarchyTest, SumsAreThoseOfHostsInOrder_BitForBit) {
  expect_done(run(GetParam(), [](Rank& self) {
    require(self.hierarchy != nullptr, "no hierarchy");
    random_program(self, 7, 60);
  }));
}

// Hazard: bits that depend on how gradients are split into buckets.
TEST_P(HostHierarchyTest, SumsDoNotDependOnTheSizeOfMessages) {
  expect_done(run(GetParam(), [](Rank& self) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      HostMessage whole;
      whole.dtype = dtype;
      whole.numel = 300007;
      whole.seed = 5;
      const at::Tensor once = values(whole, self.rank);
      at::Tensor cut = once.clone();
      self.hierarchy->all_reduce("whole", once, Op::SUM)->wait();
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      int64_t at = 0;
      for (int64_t length = 1; at < whole.numel; at += length, length = length * 3 + 1) {
        length = std::min(length, whole.numel - at);
        works.push_back(self.hierarchy->all_reduce("part", cut.narrow(0, at, length), Op::SUM));
      }
      for (const auto& work : works) work->wait();
      require(at::equal(once, cut), "other bits in other buckets");
    }
  }));
}

// Other ranks make progress without calls of this rank, as after a failed backward, or when
// backward ends before its buckets have arrived.
TEST_P(HostHierarchyTest, RankThatIsElsewhere_HoldsNobodyUp) {
  expect_done(run(GetParam(), [](Rank& self) {
    HostMessage one;
    one.numel = 100003;
    one.in_shared = true;
    const auto size = static_cast<int>(self.places.size());
    for (int away = 0; away < size; ++away) {
      one.seed = static_cast<uint64_t>(away);
      std::vector<at::Tensor> messages{message_of(self, one), message_of(self, one)};
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (const at::Tensor& message : messages)
        works.push_back(self.hierarchy->all_reduce("a message", message, Op::SUM));
      std::vector<at::Tensor> nothing{at::zeros({1})};
      if (self.rank == away) {
        works.clear();  // it drops even the works
      } else {
        for (const auto& work : works) work->wait();
        for (const at::Tensor& message : messages) check(message, one, self.places);
      }
      // Over the network, where the absent rank does nothing for the hierarchy.
      self.group->allreduce(nothing)->wait();
    }
  }));
}

/// Sends a message of each size, two in flight.
void train(Rank& self) {
  HostMessage small, large;
  small.numel = 100;
  large.numel = 300007;
  for (int i = 0; i < 2; ++i) {
    small.seed = large.seed = static_cast<uint64_t>(i);
    large.in_shared = i == 1;
    at::Tensor one = message_of(self, small);
    at::Tensor two = message_of(self, large);
    const auto issue = [&](const char* what, const at::Tensor& message) {
      return call_collective(what, *self.group,
                             [&] { return self.hierarchy->all_reduce(what, message, Op::SUM); });
    };
    const auto first = issue("small", one);
    const auto second = issue("large", two);
    wait_collective(first, "small", *self.group);
    wait_collective(second, "large", *self.group);
    check(one, small, self.places);
    check(two, large, self.places);
  }
}

/// A different one of each four steps for each layout.
bool is_tried(int step, const Places& places) {
  int layout = 0;
  for (const int host : places) layout = 3 * layout + host;
  return testing::is_tried(step, layout);
}

int count_steps(const Places& places, int victim) {
  return testing::count_steps([&](const auto& count) {
    expect_done(run(places, [&](Rank& self) {
      if (self.rank == victim) count();
      train(self);
    }));
  });
}

// Hazard: survivors on the rank's host see its process exit. Survivors on other hosts see a closed
// connection or nothing, and each waits for another survivor that has given up.
TEST_P(HostHierarchyTest, RankKilledAtAnyStep_IsNamedByEverySurvivor) {
  const Places& places = GetParam();
  for (const int victim : {0, static_cast<int>(places.size()) - 1}) {
    const int steps = count_steps(places, victim);
    ASSERT_GE(steps, 8);
    for (int step = 0; step < steps; ++step) {
      if (!is_tried(step, places)) continue;
      SCOPED_TRACE("rank " + std::to_string(victim) + ", step " + std::to_string(step) + " of " +
                   std::to_string(steps));
      const auto outcomes = run(places, [&](Rank& self) {
        if (self.rank == victim) hit_at(step, SIGKILL);
        static std::string noticed;
        static std::mutex mutex;
        on_notice([](const std::string& text) {
          const std::lock_guard<std::mutex> lock(mutex);
          noticed += "\n" + text;
        });
        try {
          train(self);
        } catch (const std::exception& error) {
          const std::lock_guard<std::mutex> lock(mutex);
          throw std::runtime_error(error.what() + noticed);
        }
      });
      ASSERT_TRUE(WIFSIGNALED(outcomes[victim].status));
      for (size_t rank = 0; rank < places.size(); ++rank) {
        if (static_cast<int>(rank) == victim) continue;
        const Outcome& outcome = outcomes[rank];
        ASSERT_NE(outcome.status, -1) << "rank " << rank << " hangs";
        // "done": the victim had finished its part for this rank.
        const std::string named = "rank " + std::to_string(victim);
        EXPECT_TRUE(outcome.said == "done" || outcome.said.find(named) != std::string::npos)
            << "rank " << rank << ": " << outcome.said;
        for (size_t other = 0; other < places.size(); ++other) {
          const bool is_named = outcome.said.find("rank " + std::to_string(other) + " has ended") !=
                                std::string::npos;
          EXPECT_TRUE(static_cast<int>(other) == victim || !is_named) << outcome.said;
        }
        // The exit of the process was detected without waiting for the timeout.
        EXPECT_EQ(outcome.said.find("imed out"), std::string::npos) << outcome.said;
      }
    }
  }
}

// Hazard: while a rank waits for another host, ranks of its own host have failed already. It does
// not look for reports in the store. Another survivor's end would release it.
TEST_P(HostHierarchyTest, RankKilledBeforeItsCall_WorkOfEverySurvivorFailsWhileTheOthersLive) {
  const Places& places = GetParam();
  for (const int victim : {0, static_cast<int>(places.size()) - 1}) {
    const auto outcomes = run(places, [&](Rank& self) {
      if (self.rank == victim) ::raise(SIGKILL);
      const auto file = [&](int rank) { return self.folder / ("over" + std::to_string(rank)); };
      bool failed = false;
      try {
        self.hierarchy->all_reduce("sum", at::ones({5000}), Op::SUM)->wait();
      } catch (const std::exception&) {
        failed = true;
      }
      require(failed, "no error");
      std::ofstream(file(self.rank)).flush();
      for (int rank = 0; rank < static_cast<int>(places.size()); ++rank) {
        for (int i = 0; i < 1000 && rank != victim && !fs::exists(file(rank)); ++i)
          ::poll(nullptr, 0, 10);
        require(rank == victim || fs::exists(file(rank)), "another survivor still waits");
      }
    });
    for (size_t rank = 0; rank < places.size(); ++rank)
      EXPECT_TRUE(static_cast<int>(rank) == victim || outcomes[rank].said == "done")
          << "rank " << rank << ": " << outcomes[rank].said;
  }
}

TEST_P(HostHierarchyTest, RankStoppedAtAnyStep_OnlyDelays) {
  const Places& places = GetParam();
  const int victim = static_cast<int>(places.size()) - 1;
  const int steps = count_steps(places, victim);
  for (int step = 0; step < steps; ++step) {
    if (!is_tried(step, places)) continue;
    SCOPED_TRACE("step " + std::to_string(step) + " of " + std::to_string(steps));
    expect_done(run(
        places,
        [&](Rank& self) {
          if (self.rank == victim) hit_at(step, SIGSTOP);
          train(self);
        },
        [](pid_t child) {
          ::poll(nullptr, 0, 50);
          ::kill(child, SIGCONT);
        }));
  }
}

TEST_P(HostHierarchyTest, RankThatWantsNone_TakesAllAlong) {
  const Places& places = GetParam();
  for (const int who : {0, static_cast<int>(places.size()) - 1}) {
    expect_done(run(
        places, [](Rank& self) { require(self.hierarchy == nullptr, "there is a hierarchy"); }, {},
        [&](int rank) {
          if (rank == who) ::setenv("APEX_HOST_CHANNEL", "0", 1);
        }));
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, HostHierarchyTest,
                         ::testing::Values(Places{0, 0, 1, 1}, Places{0, 1, 1, 0}),
                         [](const auto& info) {
                           std::string name;
                           for (const int host : info.param) name += std::to_string(host);
                           return name;
                         });

TEST(HostHierarchy, ThreeHostsOfTwo_SumsAreThose) {
  expect_done(run({0, 1, 0, 2, 1, 2}, [](Rank& self) {
    for (const int64_t numel : {1, 4097, 100003}) {
      const at::Tensor message = at::full({numel}, self.rank + 1, at::kLong);
      self.hierarchy->all_reduce("a message", message, Op::SUM)->wait();
      require(message.eq(21).all().item<bool>(), "a wrong sum");
    }
  }));
}

TEST(HostHierarchy, HostsHaveOneRankEachOrDifferentNumbers_KeepTheProcessGroup_OneTakesTheChannel) {
  for (const Places& places : {Places{0, 1, 2}, Places{0, 0, 1}, Places{0, 1, 1, 1}, {0, 0, 0}}) {
    expect_done(run(places, [](Rank& self) {
      require(self.hierarchy == nullptr, "there is a hierarchy");
      const bool one_host = self.places.front() == self.places.back();
      require(host_backend_of(*self.group)->shares_memory() == one_host,
              "whether it has a channel");
    }));
  }
}

/// System resources of this process.
struct Held {
  size_t files = 0, mappings = 0, threads = 0;
};

Held held() {
  finish_dropped_groups();  // they end on separate threads
  const auto entries = [](const char* folder) {
    const fs::directory_iterator all(folder);
    return static_cast<size_t>(std::distance(begin(all), end(all)));
  };
  Held now{entries("/proc/self/fd"), 0, entries("/proc/self/task")};
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    now.mappings += line.find("memfd:apex") != std::string::npos;
  return now;
}

/// Calls `round(i)` repeatedly; after each call the process must not hold more resources.
void repeat(int rounds, const std::function<void(int)>& round) {
  Held first;
  for (int i = 0; i < rounds; ++i) {
    round(i);
    Held now = held();
    if (i == 2) first = now;  // resources kept for later rounds exist by now
    if (i <= 2) continue;
    // A thread that has delivered its result may take a moment to exit.
    for (int look = 0; look < 1000 && now.threads > first.threads; ++look) {
      ::poll(nullptr, 0, 1);
      now = held();
    }
    const auto no_more = [&](const char* what, size_t before, size_t after) {
      require(after <= before, std::string(what) + ": " + std::to_string(before) + " at first, " +
                                   std::to_string(after) + " after " + std::to_string(i));
    };
    no_more("files", first.files + 2, now.files);  // the last groups' connections to the store
    no_more("mappings", first.mappings, now.mappings);
    no_more("threads", first.threads, now.threads);
  }
}

/// Store requests of a rank for creating a wrapper after its group: the maximum over ranks.
int64_t most_requests_of_a_wrapper(const Places& places, bool on_cpu) {
  const size_t bytes = places.size() * sizeof(int64_t);
  void* const shared =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(shared != MAP_FAILED, "no memory");
  auto* const asked = static_cast<int64_t*>(shared);
  expect_done(run(places, [&](Rank& self) {
    const auto size = static_cast<int>(places.size());
    const auto group =
        make_group(self.rank, size, in_file(self.folder / "counted", places.size()), seconds(30));
    const auto& store = dynamic_cast<testing::CountingStore&>(*group->getStore());
    const int64_t before = store.requests();
    issue_all_reduce("a comparison of models", *group, at::ones({1}))->wait();
    const auto own = make_separate_group(group, "counted", on_cpu);
    watch_with(*own, *group, "counted");
    issue_all_reduce("a control message", *own, at::ones({1}))->wait();
    asked[self.rank] = store.requests() - before;
    group->barrier()->wait();
  }));
  const int64_t most = *std::max_element(asked, asked + places.size());
  ::munmap(shared, bytes);
  return most;
}

// Hazard: if N ranks each query all others, the store is busy for minutes from N = 1,000 on.
// (Gloo's own connections between CPU ranks of several hosts do that; none are made for GPUs or on
// one host.) Uses a file store, where each text is one request.
TEST(StoreTraffic, OfAWrapper_GrowsWithTheRanksOfThisHostOnly) {
  const int64_t two = most_requests_of_a_wrapper({0, 0}, /*on_cpu=*/true);
  EXPECT_LE(most_requests_of_a_wrapper({0, 0, 0, 0}, true), two + 2 * 2);
  EXPECT_LE(most_requests_of_a_wrapper({0, 0}, false), two);
  EXPECT_LE(most_requests_of_a_wrapper({0, 0, 1, 1, 2, 2, 3, 3}, false), two);
  EXPECT_LE(two, 20);
}

class HostGroups : public HostHierarchyTest {};

TEST_P(HostGroups, OfReducersThatEnd_LeaveNoFileMappingOrThread) {
  expect_done(run(GetParam(), [](Rank& self) {
    repeat(20, [&](int i) {
      const std::string name = "again " + std::to_string(i);
      const auto group = make_separate_group(self.group, name);
      watch_with(*group, *self.group, name);
      issue_all_reduce("a sum", *group, at::ones({100003}))->wait();
    });
  }));
}

// A script's group ends without notice. Hazard: a later group with the same name and address, and
// with a store at the same address, is taken for it.
TEST_P(HostGroups, OfScriptsThatEnd_LeaveNothingToLaterOnesOfTheirNameAndAddress) {
  expect_done(run(GetParam(), [](Rank& self) {
    c10::weak_intrusive_ptr<HostBackend> before{c10::intrusive_ptr<HostBackend>()};
    repeat(20, [&](int i) {
      const auto size = static_cast<int>(self.places.size());
      const auto group =
          make_group(self.rank, size, in_file(self.folder / std::to_string(i), self.places.size()),
                     seconds(30));
      const auto backend = host_backend_of(*group);
      const bool one_host = self.places.front() == self.places.back();
      require((backend != nullptr) == one_host, "whether there is a channel");
      require(!backend || backend != before.lock(), "the channel of a group that has ended");
      before = c10::weak_intrusive_ptr<HostBackend>(backend);
      const at::Tensor message = at::full({20000}, i);
      issue_all_reduce("a sum", *group, message)->wait();
      require(message.eq(i * size).all().item<bool>(), "the sum");
    });
  }));
}

INSTANTIATE_TEST_SUITE_P(Hosts, HostGroups, ::testing::Values(Places{0, 0, 0}, Places{0, 0, 1, 1}),
                         [](const auto& info) {
                           return std::string(info.param.back() == 0 ? "One" : "Two");
                         });

TEST(HostHierarchy, ForkedChildIsNoRank) {
  expect_done(run({0, 0, 1, 1}, [](Rank& self) {
    const auto before = self.hierarchy->all_reduce("before the fork", at::ones({3}), Op::SUM);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);  // the child would wait for a thread that does not exist
      const auto is_refused = [](const auto& call) {
        try {
          call();
        } catch (const std::exception& error) {
          return std::string(error.what()).find("was forked") != std::string::npos;
        }
        return false;
      };
      const bool refused =
          is_refused([&] { self.hierarchy->all_reduce("in the child", at::ones({3}), Op::SUM); }) &&
          is_refused([&] { before->wait(); });
      ::_exit(refused ? 0 : 2);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    require(status == 0, "the child was not refused");
    before->wait();
    train(self);
  }));
}

}  // namespace
}  // namespace apex::parallel
