// SPDX-License-Identifier: BSD-3-Clause
#include "support/host_steps.h"

#include "../../src/transport/futex_event.cpp"
#include "../../src/transport/host_channel.cpp"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <support/host_threads.h>

#include "endings.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <future>
#include <vector>

/// Ranks as processes. One of them is killed or stopped at every step of the protocol in turn:
/// enumerated, not sampled.

namespace apex::parallel {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using testing::expect_done;
using testing::hit_at;
using testing::Outcome;

/// A rank's message to the others, through pipes.
struct Introduction {
  char process[192] = {};
  HostFile file;
};

void write_all(int fd, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd, at, bytes);
    if (written <= 0) ::_exit(90);
    at += written;
    bytes -= static_cast<size_t>(written);
  }
}

void read_all(int fd, void* data, size_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::read(fd, at, bytes);
    if (got <= 0) ::_exit(91);
    at += got;
    bytes -= static_cast<size_t>(got);
  }
}

/// A rank's pipes to and from the parent, which forwards all messages.
struct Link {
  int to_parent[2];
  int from_parent[2];
};

std::shared_ptr<HostChannel> connect(int rank, int ranks, const Link& link,
                                     std::chrono::milliseconds timeout) {
  auto memory = HostChannel::make_memory();
  Introduction mine;
  const std::string name = this_process()->encode();
  std::memcpy(mine.process, name.data(), name.size());
  mine.file = memory->file();
  write_all(link.to_parent[1], &mine, sizeof(mine));
  std::vector<Introduction> all(static_cast<size_t>(ranks));
  read_all(link.from_parent[0], all.data(), sizeof(Introduction) * all.size());
  std::vector<HostChannel::Peer> peers(static_cast<size_t>(ranks));
  for (int peer = 0; peer < ranks; ++peer) {
    peers[peer].process = ProcessName::decode(all[peer].process);
    peers[peer].named = peer;
    if (peer != rank)
      peers[peer].memory = std::make_shared<PeerMemory>(peers[peer].process->pid, all[peer].file);
  }
  char ready = 1;
  write_all(link.to_parent[1], &ready, 1);
  read_all(link.from_parent[0], &ready, 1);
  return std::make_shared<HostChannel>(rank, memory, std::move(peers), timeout);
}

/// Every kind of collective, small and large, in shared memory and not, several in a row. Checks
/// the sums; throws the error.
void train(HostChannel& channel, int rank, int ranks) {
  const double sum = ranks * (ranks - 1) / 2.0;
  const auto check = [](const at::Tensor& tensor, double expected, const char* what) {
    if (!tensor.eq(expected).all().item<bool>())
      throw std::runtime_error(std::string("wrong ") + what);
  };
  at::Tensor small = at::full({10}, rank, at::kFloat);
  channel.all_reduce("small", small, Op::SUM)->wait();
  check(small, sum, "small sum");
  at::Tensor first = at::full({9000}, rank, at::kFloat);
  at::Tensor bucket = channel.allocate(20000, at::kFloat);
  bucket.fill_(rank);
  auto one = channel.all_reduce("first", first, Op::SUM);
  auto two = channel.all_reduce("bucket", bucket, Op::SUM);
  one->wait();
  two->wait();
  check(first, sum, "large sum");
  check(bucket, sum, "sum in shared memory");
  at::Tensor all = at::empty({ranks * 40000}, at::kFloat);
  channel.all_gather("gather", {all}, at::full({40000}, rank, at::kFloat))->wait();
  check(all.narrow(0, 40000 * (ranks - 1), 40000), ranks - 1, "gathered");
  at::Tensor root = at::full({3}, rank, at::kFloat);
  channel.broadcast("broadcast", root, 1)->wait();
  check(root, 1, "broadcast");
  at::Tensor share = at::empty({3000}, at::kFloat);
  channel.reduce_scatter("share", share, {at::full({3000 * ranks}, rank, at::kFloat)}, Op::SUM)
      ->wait();
  check(share, sum, "share of a sum");
}

/// Runs the ranks. Calls `act(rank)` in each process before it trains.
std::vector<Outcome> run(int ranks, const std::function<void(int rank)>& act,
                         const std::function<void(pid_t)>& on_stop = {}) {
  std::vector<Link> links(static_cast<size_t>(ranks));
  for (Link& link : links) {
    if (::pipe2(link.to_parent, O_CLOEXEC) != 0 || ::pipe2(link.from_parent, O_CLOEXEC) != 0)
      throw Error("no pipes");
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(testing::fork_rank(links[rank].to_parent[1], [&] {
      auto channel = connect(rank, ranks, links[rank], seconds(20));
      act(rank);
      train(*channel, rank, ranks);
      channel.reset();
      finish_dropped_groups();
    }));
  }
  std::vector<Introduction> all(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    ::close(links[rank].to_parent[1]);
    ::close(links[rank].from_parent[0]);
    read_all(links[rank].to_parent[0], &all[rank], sizeof(Introduction));
  }
  char ready = 0;
  for (const Link& link : links)
    write_all(link.from_parent[1], all.data(), sizeof(Introduction) * all.size());
  for (const Link& link : links) read_all(link.to_parent[0], &ready, 1);
  for (const Link& link : links) write_all(link.from_parent[1], &ready, 1);

  std::vector<int> pipes;
  for (const Link& link : links) pipes.push_back(link.to_parent[0]);
  const auto outcomes = testing::wait_for_ranks(
      children, pipes, std::chrono::steady_clock::now() + seconds(15), on_stop);
  for (const Link& link : links) ::close(link.from_parent[1]);
  return outcomes;
}

int count_steps(int ranks, int victim) {
  return testing::count_steps([&](const auto& count) {
    expect_done(run(ranks, [&](int rank) {
      if (rank == victim) count();
    }));
  });
}

int open_files() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

class HostProcesses : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    at::ones({10}).sum();     // starts what starts once, before forking
    finish_dropped_groups();  // from earlier tests
  }
};

// Hazard: a rank that is killed between two stores leaves its peers waiting for something it had
// announced, or reading something half written.
TEST_P(HostProcesses, RankKilledAtAnyStepIsNamedWithinASecond) {
  const auto [ranks, victim] = GetParam();
  const int files = open_files();
  const int steps = count_steps(ranks, victim);
  ASSERT_GT(steps, 20);
  for (int step = 0; step < steps; ++step) {
    if (!testing::is_tried(step, ranks + victim)) continue;
    SCOPED_TRACE("step " + std::to_string(step) + " of " + std::to_string(steps));
    const auto outcomes = run(ranks, [&, v = victim](int rank) {
      if (rank == v) hit_at(step, SIGKILL);
    });
    if (!WIFSIGNALED(outcomes[victim].status)) continue;  // it slept less often this time
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == victim) continue;
      ASSERT_TRUE(WIFEXITED(outcomes[rank].status)) << "rank " << rank << " hangs";
      const std::string& said = outcomes[rank].said;
      // "done": the victim had finished its part for this rank.
      const std::string named = "rank " + std::to_string(victim) + " has ended (process ";
      EXPECT_TRUE(said == "done" || said.find(named) != std::string::npos) << said;
    }
  }
  EXPECT_LE(open_files(), files);  // threads of earlier tests may still close files
}

TEST_P(HostProcesses, RankStoppedAtAnyStepOnlyDelays) {
  const auto [ranks, victim] = GetParam();
  const int steps = count_steps(ranks, victim);
  for (int step = 0; step < steps; ++step) {
    if (!testing::is_tried(step, ranks + victim + 1)) continue;
    SCOPED_TRACE("step " + std::to_string(step) + " of " + std::to_string(steps));
    const auto outcomes = run(
        ranks,
        [&, v = victim](int rank) {
          if (rank == v) hit_at(step, SIGSTOP);
        },
        [](pid_t child) {
          ::poll(nullptr, 0, 25);  // longer than a sleep, so that peers check the process
          ::kill(child, SIGCONT);
        });
    expect_done(outcomes);
  }
}

INSTANTIATE_TEST_SUITE_P(RanksAndVictim, HostProcesses,
                         ::testing::Values(std::tuple(2, 0), std::tuple(2, 1), std::tuple(3, 1)));

TEST(HostProcess, RankLeavesBecauseAnotherHasEnded_TheOneThatHasEndedIsNamed) {
  const auto outcomes = run(3, [](int rank) {
    if (rank == 2) ::kill(::getpid(), SIGKILL);
    if (rank == 0) throw Error("it leaves");
    ::poll(nullptr, 0, 300);
  });
  const std::string said = outcomes[1].said.c_str();
  EXPECT_EQ(said.find("rank 2 has ended (process "), 0U) << said;
}

TEST(Endings, EndElsewhere_WhileAnEarlierEndIsStuck_DoesNotWaitForIt) {
  std::promise<void> release, ended;
  const std::shared_future<void> released = release.get_future().share();
  end_elsewhere([released] { released.wait(); }, /*may_be_stuck=*/true);
  end_elsewhere([&] { ended.set_value(); }, /*may_be_stuck=*/false);
  EXPECT_EQ(ended.get_future().wait_for(seconds(60)), std::future_status::ready);
  release.set_value();
  finish_dropped_groups();
}

TEST(HostProcess, MemoryThatIsNotThereIsAnError) {
  const auto memory = HostMemory::create(1, 0);
  const HostFile right = memory->file();
  PeerMemory(::getpid(), right);
  std::vector<HostFile> wrong(4, right);
  wrong[0].fd = 0;
  wrong[1].fd = 12345;
  ++wrong[2].number;
  wrong[3].bytes *= 2;
  for (const HostFile& file : wrong) EXPECT_THROW(PeerMemory(::getpid(), file), Error);
}

}  // namespace
}  // namespace apex::parallel
