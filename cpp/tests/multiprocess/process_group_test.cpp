// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <apex/distributed.h>
#include <apex/error.h>
#include <support/processes.h>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace apex::testing {
namespace {

namespace dist = apex::distributed;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// A process gets its backend, init_method, timeout, rank and size from these variables.
dist::ProcessGroupOptions options_from_environment() {
  dist::ProcessGroupOptions options;
  if (!variable("TEST_INIT_METHOD").empty()) {
    options.init_method(variable("TEST_INIT_METHOD"));
  }
  if (!variable("TEST_RANK").empty()) {
    options.rank(std::stoi(variable("TEST_RANK")));
    options.world_size(std::stoi(variable("TEST_WORLD_SIZE")));
  }
  const std::string timeout = variable("TEST_TIMEOUT_MS");
  options.timeout(std::chrono::milliseconds(timeout.empty() ? 30000 : std::stoll(timeout)));
  return options;
}

Group init() {
  const std::string backend = variable("TEST_BACKEND");
  return dist::init_process_group(backend.empty() ? "gloo" : backend, options_from_environment());
}

double all_reduce(const Group& group, double value) {
  std::vector<at::Tensor> tensors{at::full({3}, value, at::kDouble)};
  group->allreduce(tensors)->wait();
  return tensors[0][1].item<double>();
}

const Scenario kCollectives("collectives", [] {
  require(!dist::is_initialized(), "initialized before init_process_group()");
  const Group group = init();
  const int rank = dist::rank();
  const int size = dist::world_size();
  require(dist::is_initialized(), "not initialized");
  require(dist::get_default_group() == group, "another default group");
  require(group->getRank() == rank && group->getSize() == size, "rank or size is wrong");
  require(c10d::resolve_process_group("0") == group, "not registered by name");
  const auto type = variable("TEST_BACKEND") == "apex" ? c10d::ProcessGroup::BackendType::CUSTOM
                                                       : c10d::ProcessGroup::BackendType::GLOO;
  require(group->getBackendType() == type, "another type of backend");
  const double sum = all_reduce(group, rank + 1);
  require(sum == size * (size + 1) / 2.0, "all-reduce gave " + std::to_string(sum));
  dist::barrier();
  dist::destroy_process_group();
  require(!dist::is_initialized(), "still initialized");
  dist::destroy_process_group();  // no effect
  std::cout << "rank " << rank << " of " << size << std::endl;
});

at::Tensor filled(int64_t rows, double value, at::ScalarType dtype) {
  return at::full({rows, 3}, value, at::TensorOptions().dtype(dtype));
}

void check_tensor_collectives(const Group& group) {
  const int rank = dist::rank(group), size = dist::world_size(group);
  const double sum = size * (size + 1) / 2.0;
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16, at::kInt, at::kComplexFloat}) {
    at::Tensor reduced = filled(4, rank + 1, dtype);
    dist::all_reduce(reduced, c10d::ReduceOp::SUM, group);
    require(reduced.equal(filled(4, sum, dtype)), "all_reduce() is wrong");
    at::Tensor copied = filled(2, rank, dtype);
    dist::broadcast(copied, size - 1, group);
    require(copied.equal(filled(2, size - 1, dtype)), "broadcast() is wrong");
    const at::Tensor gathered = dist::all_gather(filled(1, rank, dtype), group);
    require(gathered.sizes() == at::IntArrayRef({size, 1, 3}), "all_gather(): another shape");
    for (int64_t peer = 0; peer < size; ++peer) {
      require(gathered[peer].equal(filled(1, static_cast<double>(peer), dtype)),
              "all_gather() is wrong");
    }
    at::Tensor entries = at::empty({size, 1, 3}, at::TensorOptions().dtype(dtype));
    for (int64_t peer = 0; peer < size; ++peer) entries[peer].fill_(10 * (rank + 1) + peer);
    require(dist::reduce_scatter(entries, group).equal(filled(1, 10 * sum + size * rank, dtype)),
            "reduce_scatter() is wrong");
  }
  using Op = c10d::ReduceOp;
  for (const at::ScalarType dtype : {at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf,
                                     at::kBFloat16, at::kFloat, at::kDouble}) {
    double product = 1;
    for (int r = 1; r <= size; ++r) product *= r;
    const std::pair<Op::RedOpType, double> results[] = {
        {Op::SUM, sum}, {Op::PRODUCT, product}, {Op::MIN, 1}, {Op::MAX, size}};
    for (const auto& [op, result] : results) {
      at::Tensor reduced = filled(4, rank + 1, dtype);
      dist::all_reduce(reduced, op, group);
      require(reduced.equal(filled(4, result, dtype)), "all_reduce() of another operation");
    }
  }
  // All backends refuse an operation that only some of them support.
  const std::pair<Op::RedOpType, at::ScalarType> refused[] = {
      {Op::SUM, at::kUInt16}, {Op::SUM, at::kShort},        {Op::SUM, at::kBool},
      {Op::AVG, at::kFloat},  {Op::MAX, at::kComplexFloat}, {Op::SUM, at::kFloat8_e4m3fn},
      {Op::BAND, at::kFloat}, {Op::PREMUL_SUM, at::kFloat}, {Op::SUM, at::kUInt64}};
  for (const auto& [op, dtype] : refused) {
    const at::Tensor zeros = at::zeros({size, 2}, at::TensorOptions().dtype(dtype));
    for (const bool scatters : {false, true}) {
      if (scatters && op != Op::SUM) continue;
      std::string text;
      try {
        scatters ? static_cast<void>(dist::reduce_scatter(zeros, group))
                 : dist::all_reduce(zeros, op, group);
      } catch (const InvalidArgument& error) {
        text = error.what();
      }
      require(text.find("supported are SUM, PRODUCT, MIN and MAX of uint8") != std::string::npos &&
                  text.find(c10::toString(dtype)) != std::string::npos,
              "not refused, or by another message: " + text);
    }
  }
}

// Through shared memory, and through the group.
const Scenario kGroupsOfOwnMaking("groups_of_own_making", [] {
  const Group world = init();
  // Like a program with its own store.
  const auto store = c10::make_intrusive<c10d::PrefixStore>("own", world->getStore());
  const auto group =
      c10::make_intrusive<c10d::ProcessGroup>(store, world->getRank(), world->getSize());
  dist::add_host_backend(group, std::chrono::seconds(20), "own");
  require(group->getBackend(at::kCPU)->getBackendName() == "apex", "another backend");
  std::vector<at::Tensor> tensors{at::full({1000}, group->getRank() + 1, at::kFloat)};
  const auto work = group->allreduce(tensors);
  work->getFuture()->wait();
  require(tensors[0].eq(3).all().item<bool>(), "wrong sum");
  bool refused = false;
  try {
    dist::add_host_backend(group, std::chrono::seconds(0));
  } catch (const apex::InvalidArgument&) {
    refused = true;
  }
  require(refused, "a timeout of nothing");
  dist::destroy_process_group();
});

const Scenario kTensorCollectives("tensor_collectives", [] {
  const Group group = init();
  check_tensor_collectives({});
  check_tensor_collectives(dist::new_group({0, 1}));
  const at::Tensor tensor = at::zeros({dist::world_size() + 1, 2});
  for (const auto& refused :
       {std::function<void()>([&] { dist::reduce_scatter(tensor); }),
        std::function<void()>([&] { dist::broadcast(tensor, 3); }),
        std::function<void()>([&] { dist::all_reduce(at::Tensor()); }),
        std::function<void()>([&] { dist::all_reduce(at::empty({2}, at::kMeta)); }),
        std::function<void()>([&] { dist::broadcast(at::empty({2}, at::kMeta)); }),
        std::function<void()>([&] { dist::all_gather(at::empty({2}, at::kMeta)); }),
        std::function<void()>([&] { dist::reduce_scatter(at::empty({2, 2}, at::kMeta)); }),
        std::function<void()>([&] { dist::all_reduce(at::zeros({2, 2}).to_sparse()); }),
        std::function<void()>([&] { dist::all_reduce(tensor.t()); }), std::function<void()>([&] {
          dist::all_reduce(at::zeros({2}, at::kComplexFloat).conj());
        })}) {
    try {
      refused();
      require(false, "a wrong argument was taken");
    } catch (const InvalidArgument&) {
    }
  }
  dist::barrier();
  dist::destroy_process_group();
});

// A rank that writes to an exited rank would be killed as well.
const Scenario kBrokenPipes("broken_pipes", [] {
  struct sigaction chosen{};
  chosen.sa_handler = [](int) {};
  if (variable("TEST_CHOSEN") == "1") sigaction(SIGPIPE, &chosen, nullptr);
  init();
  struct sigaction now{};
  sigaction(SIGPIPE, nullptr, &now);
  const bool own = now.sa_handler == chosen.sa_handler;
  require(variable("TEST_CHOSEN") == "1" ? own : now.sa_handler == SIG_IGN,
          "broken pipes: not as expected");
  dist::destroy_process_group();
});

const Scenario kSubgroups("subgroups", [] {
  init();
  const int rank = dist::rank();
  const Group ends = dist::new_group({2, 0});
  const Group all = dist::new_group({0, 1, 2}, "gloo", std::chrono::seconds(30));
  require((ends.get() != nullptr) == (rank != 1), "membership is wrong");
  if (ends) {
    require(dist::rank(ends) == rank / 2, "ranks are not in ascending order");
    require(dist::world_size(ends) == 2, "size is wrong");
    require(all_reduce(ends, rank) == 2.0, "all-reduce is wrong");
    require(c10d::resolve_process_group("1") == ends, "not registered by name");
    dist::barrier(ends);
  }
  require(all_reduce(all, rank) == 3.0, "all-reduce is wrong");
  for (const std::vector<int>& bad : {std::vector<int>{}, {3}, {-1}, {0, 0}}) {
    try {
      dist::new_group(bad);
      require(false, "bad ranks were taken");
    } catch (const InvalidArgument&) {
    }
  }
  // Refused calls have not used up a name.
  require(all_reduce(dist::new_group({0, 1, 2}), 1.0) == 3.0, "all-reduce is wrong");
  const Group everybody = dist::new_group();
  require(everybody != dist::get_default_group() && everybody->getSize() == 3, "not a new group");
  require(all_reduce(everybody, 1.0) == 3.0, "all-reduce is wrong");
  const Group held = dist::new_group({0, 1, 2}, "apex");
  dist::destroy_process_group();
  try {
    all_reduce(held, 1.0);
    require(false, "a group that was shut down was used");
  } catch (const apex::Error&) {
  }
});

const Scenario kTwice("twice", [] {
  for (const char* port : {"TEST_PORT", "TEST_OTHER_PORT"}) {
    dist::ProcessGroupOptions options;
    options.init_method("tcp://127.0.0.1:" + variable(port));
    options.timeout(std::chrono::seconds(30));
    const Group group = dist::init_process_group("gloo", options);
    try {
      dist::init_process_group("gloo", options);
      require(false, "a second call was taken");
    } catch (const InvalidArgument&) {
    }
    require(all_reduce(group, 1.0) == 2.0, "all-reduce is wrong");
    dist::barrier();
    dist::destroy_process_group();
  }
});

// Rank 0 waits in new_group() on one thread. Rank 1 calls new_group() only after rank 0 has reached
// all_reduce() on another thread.
const Scenario kNewGroupBeside("new_group_beside", [] {
  init();
  for (int round = 0; round < 20; ++round) {
    std::thread meeting;
    if (dist::rank() == 0) meeting = std::thread([] { dist::new_group(); });
    dist::all_reduce(at::ones({2}));
    require(dist::is_initialized() && dist::local_rank() == dist::rank(), "no default group");
    if (dist::rank() == 0) {
      meeting.join();
    } else {
      dist::new_group();
    }
  }
  dist::destroy_process_group();
});

const Scenario kNoDestroy("no_destroy", [] {
  const Group group = init();
  require(all_reduce(group, 1.0) == 2.0, "all-reduce is wrong");
});

// Rank 0 exits with a pending collective that rank 1, which outlives it, never joins.
const Scenario kPendingAtEnd("pending_at_end", [] {
  const Group group = init();
  std::vector<at::Tensor> tensors{at::full({1}, dist::rank() == 0 ? getpid() : 0, at::kLong)};
  group->allreduce(tensors)->wait();
  if (dist::rank() == 0) {
    const auto pending = group->allreduce(tensors);
    require(!pending->isCompleted(), "completed without rank 1");
    return;
  }
  const int peer = static_cast<int>(syscall(SYS_pidfd_open, tensors[0].item<int64_t>(), 0));
  pollfd ended{peer, POLLIN, 0};
  require(peer < 0 || poll(&ended, 1, -1) == 1, "could not wait for rank 0");
});

const Scenario kLostPeer("lost_peer", [] {
  init();
  dist::barrier();
  if (dist::rank() == 1) {
    _exit(0);
  }
  dist::barrier();
});

::testing::AssertionResult failed_with(const ProcessResult& result,
                                       const std::vector<std::string>& parts) {
  if (result.status != 1 || result.killed) {
    return ::testing::AssertionFailure()
           << "status " << result.status << (result.killed ? " (killed)" : "") << "\n"
           << result.output;
  }
  const auto start = result.output.find("error: ");
  for (const std::string& part : parts) {
    if (start == std::string::npos || result.output.find(part, start) == std::string::npos) {
      return ::testing::AssertionFailure() << "no \"" << part << "\" in\n" << result.output;
    }
  }
  return ::testing::AssertionSuccess();
}

// For processes that are expected to fail on their own.
std::vector<ProcessResult> run_to_the_end(const std::vector<ProcessSpec>& specs) {
  RunOptions options;
  options.stop_at_failure = false;
  return run_processes(specs, options);
}

TEST(ProcessGroup, Torchrun_ThreeProcesses_Collect) {
  const auto results = run_processes(ranks_of("collectives", 3));
  EXPECT_EQ(failures_of(results), "");
  EXPECT_NE(results[2].output.find("rank 2 of 3"), std::string::npos);
}

TEST(ProcessGroup, BrokenPipes_Gloo_IgnoresThemUnlessTheProgramHasAHandler) {
  for (const char* chosen : {"0", "1"}) {
    EXPECT_EQ(failures_of(run_processes(ranks_of("broken_pipes", 1, {{"TEST_CHOSEN", chosen}}))),
              "");
  }
}

TEST(ProcessGroup, Torchrun_OneProcess_Works) {
  EXPECT_EQ(failures_of(run_processes(ranks_of("collectives", 1))), "");
}

TEST(ProcessGroup, PerDeviceBackend_CpuGloo_Works) {
  EXPECT_EQ(failures_of(run_processes(ranks_of("collectives", 2, {{"TEST_BACKEND", "cpu:gloo"}}))),
            "");
}

TEST(ProcessGroup, HostBackend_SharedMemoryOrGloo_Works) {
  for (const char* channel : {"1", "0"}) {
    for (const char* scenario : {"collectives", "tensor_collectives", "groups_of_own_making"}) {
      const auto results = run_processes(
          ranks_of(scenario, 2, {{"TEST_BACKEND", "apex"}, {"APEX_HOST_CHANNEL", channel}}));
      EXPECT_EQ(failures_of(results), "") << scenario << " with APEX_HOST_CHANNEL=" << channel;
    }
  }
}

TEST(ProcessGroup, AgentStore_HostedElsewhere_EveryRankIsAClient) {
  c10d::TCPStoreOptions server;
  server.isServer = true;
  server.waitWorkers = false;
  server.port = 0;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", server);
  const auto specs = ranks_of("collectives", 2,
                              {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                               {"MASTER_PORT", std::to_string(agent->getPort())}});
  EXPECT_EQ(failures_of(run_processes(specs)), "");
}

TEST(ProcessGroup, SlurmAndMpi_TheirVariables_Suffice) {
  const std::string port = std::to_string(free_port());
  std::vector<ProcessSpec> slurm, mpi;
  for (const char* rank : {"0", "1"}) {
    slurm.push_back({"collectives",
                     {{"SLURM_PROCID", rank},
                      {"SLURM_STEP_NUM_TASKS", "2"},
                      {"SLURM_LOCALID", rank},
                      {"SLURM_JOB_NODELIST", "localhost"},
                      {"MASTER_PORT", port}}});
    mpi.push_back({"collectives",
                   {{"OMPI_COMM_WORLD_RANK", rank},
                    {"OMPI_COMM_WORLD_SIZE", "2"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                    {"MASTER_PORT", port}}});
  }
  EXPECT_EQ(failures_of(run_processes(slurm)), "");
  EXPECT_EQ(failures_of(run_processes(mpi)), "");
}

TEST(ProcessGroup, TcpAddress_OneProcess_TakesAnyFreePort) {
  EXPECT_EQ(failures_of(run_processes({{"collectives",
                                        {{"TEST_INIT_METHOD", "tcp://127.0.0.1:0"},
                                         {"TEST_RANK", "0"},
                                         {"TEST_WORLD_SIZE", "1"}}}})),
            "");
}

TEST(ProcessGroup, TcpAddress_RanksFromOptions_Work) {
  const std::string address = "tcp://127.0.0.1:" + std::to_string(free_port());
  std::vector<ProcessSpec> specs;
  for (const char* const rank : {"0", "1"})
    specs.push_back(
        {"collectives",
         {{"TEST_INIT_METHOD", address}, {"TEST_RANK", rank}, {"TEST_WORLD_SIZE", "2"}}});
  EXPECT_EQ(failures_of(run_processes(specs)), "");
}

TEST(ProcessGroup, DestroyAndInitAgain_Works) {
  const auto specs = ranks_of("twice", 2,
                              {{"TEST_PORT", std::to_string(free_port())},
                               {"TEST_OTHER_PORT", std::to_string(free_port())}});
  EXPECT_EQ(failures_of(run_processes(specs)), "");
}

TEST(ProcessGroup, NewGroup_MembersAndOthers_Agree) {
  EXPECT_EQ(failures_of(run_processes(ranks_of("subgroups", 3))), "");
}

TEST(ProcessGroup, NewGroup_OnAThread_LeavesOtherThreadsTheGroupsThatThereAre) {
  EXPECT_EQ(failures_of(run_processes(ranks_of("new_group_beside", 2))), "");
}

TEST(ProcessGroup, ProcessEnd_WithoutDestroy_IsClean) {
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(failures_of(run_processes(ranks_of("no_destroy", 2))), "") << "run " << i;
  }
}

TEST(ProcessGroup, ProcessEnd_WithPendingCollective_DoesNotWaitForIt) {
  // The group's timeout is far longer than that of run_processes().
  const auto specs = ranks_of("pending_at_end", 2, {{"TEST_TIMEOUT_MS", "600000"}});
  EXPECT_EQ(failures_of(run_processes(specs)), "");
}

TEST(ProcessGroup, Barrier_PeerHasEnded_Throws) {
  const auto results = run_to_the_end(ranks_of("lost_peer", 2));
  EXPECT_TRUE(failed_with(results[0], {"rank 0 of 2: barrier() failed"}));
}

TEST(ProcessGroup, Variables_Missing_MessageNamesThem) {
  const auto results = run_to_the_end(
      {{"collectives", {}},
       {"collectives", {{"RANK", "0"}, {"WORLD_SIZE", "2"}}},
       {"collectives", {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}}}});
  EXPECT_TRUE(failed_with(results[0], {"RANK and WORLD_SIZE are not set", "torchrun"}));
  EXPECT_TRUE(failed_with(results[1], {"MASTER_ADDR is not set"}));
  EXPECT_TRUE(failed_with(results[2], {"MASTER_PORT is not set"}));
}

TEST(ProcessGroup, Master_Unreachable_FailsWithinTheTimeout) {
  const std::string port = std::to_string(free_port());
  auto specs = ranks_of("collectives", 2, {{"TEST_TIMEOUT_MS", "2000"}, {"MASTER_PORT", port}});
  specs.erase(specs.begin());
  EXPECT_TRUE(failed_with(run_to_the_end(specs)[0],
                          {"rank 1 of 2 at tcp://127.0.0.1:" + port,
                           "the store of rank 0 does not answer", "MASTER_ADDR"}));
  specs[0].environment["MASTER_ADDR"] = "no-such-host.invalid";
  EXPECT_TRUE(failed_with(run_to_the_end(specs)[0], {"the store of rank 0 does not answer"}));
}

TEST(ProcessGroup, Ranks_NotAllStarted_FailsWithinTheTimeout) {
  auto specs = ranks_of("collectives", 2, {{"TEST_TIMEOUT_MS", "2000"}});
  specs.pop_back();
  EXPECT_TRUE(failed_with(run_to_the_end(specs)[0], {"rank 0 of 2", "not every rank joined"}));
}

TEST(ProcessGroup, Port_InUse_MessageSaysSo) {
  const OccupiedPort occupied;
  const std::string port = std::to_string(occupied.port());
  auto specs = ranks_of("collectives", 2, {{"TEST_TIMEOUT_MS", "2000"}, {"MASTER_PORT", port}});
  specs.pop_back();
  EXPECT_TRUE(failed_with(run_to_the_end(specs)[0], {"port " + port + " is in use"}));
}

TEST(Collectives, OfTensors_ThroughSharedMemoryAndWithout_AreRight) {
  for (const char* channel : {"1", "0"}) {
    const auto specs = ranks_of("tensor_collectives", 2, {{"APEX_HOST_CHANNEL", channel}});
    EXPECT_EQ(failures_of(run_processes(specs)), "") << channel;
  }
}

TEST(ProcessGroup, NcclWithoutGpu_FailsAtOnce) {
  for (const char* backend : {"nccl", "cpu:gloo,cuda:nccl"}) {
    auto specs =
        ranks_of("collectives", 2, {{"TEST_BACKEND", backend}, {"CUDA_VISIBLE_DEVICES", "-1"}});
    specs.pop_back();
    // A build without CUDA reports that; one with CUDA reports the missing GPU.
    EXPECT_TRUE(failed_with(run_to_the_end(specs)[0], {"NCCL", "gloo backend"})) << backend;
  }
}

TEST(ProcessGroup, Timeout_NotPositive_IsRefused) {
  EXPECT_TRUE(failed_with(run_to_the_end(ranks_of("collectives", 1, {{"TEST_TIMEOUT_MS", "0"}}))[0],
                          {"timeout"}));
}

TEST(ProcessGroup, Timeout_LongerThanClocksCount_IsNoLimit) {
  const std::string longest = std::to_string(std::chrono::milliseconds::max().count());
  const auto specs = ranks_of("collectives", 2, {{"TEST_TIMEOUT_MS", longest}});
  EXPECT_EQ(failures_of(run_processes(specs)), "");
}

TEST(ProcessGroup, Accessors_WithoutAGroup_Throw) {
  EXPECT_FALSE(dist::is_initialized());
  EXPECT_THROW(dist::rank(), InvalidArgument);
  EXPECT_THROW(dist::world_size(), InvalidArgument);
  EXPECT_THROW(dist::local_rank(), InvalidArgument);
  EXPECT_THROW(dist::get_default_group(), InvalidArgument);
  EXPECT_THROW(dist::barrier(), InvalidArgument);
  EXPECT_THROW(dist::new_group({0}), InvalidArgument);
  dist::destroy_process_group();
}

}  // namespace
}  // namespace apex::testing
