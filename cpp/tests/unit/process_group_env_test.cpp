// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <apex/distributed/detail/launch_environment.h>
#include <apex/error.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace apex::distributed {
namespace {

EnvironmentLookup variables(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const std::string& name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional<std::string>(found->second);
  };
}

template <typename Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

::testing::AssertionResult mentions(const std::string& text,
                                    const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "\"" << text << "\" does not mention " << part;
    }
  }
  return ::testing::AssertionSuccess();
}

TEST(LaunchRanks, Torchrun_AllVariables_AreRead) {
  const auto ranks = read_launch_ranks(variables(
      {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}}));
  ASSERT_TRUE(ranks);
  EXPECT_EQ(ranks->launcher, "torchrun");
  EXPECT_EQ(ranks->rank, 5);
  EXPECT_EQ(ranks->world_size, 8);
  EXPECT_EQ(ranks->local_rank, 1);
  EXPECT_EQ(ranks->local_world_size, 4);
}

TEST(LaunchRanks, OtherLaunchers_TheirVariables_AreRead) {
  const std::vector<std::map<std::string, std::string>> environments = {
      {{"OMPI_COMM_WORLD_RANK", "3"},
       {"OMPI_COMM_WORLD_SIZE", "6"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}},
      {{"PMI_RANK", "3"}, {"PMI_SIZE", "6"}, {"MPI_LOCALRANKID", "1"}},
      {{"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "6"}, {"SLURM_LOCALID", "1"}}};
  for (const auto& environment : environments) {
    const auto ranks = read_launch_ranks(variables(environment));
    ASSERT_TRUE(ranks) << environment.begin()->first;
    EXPECT_EQ(ranks->rank, 3);
    EXPECT_EQ(ranks->world_size, 6);
    EXPECT_EQ(ranks->local_rank, 1);
  }
}

TEST(LaunchRanks, SeveralLaunchers_InnermostWins) {
  std::map<std::string, std::string> all = {
      {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_NUM_TASKS", "3"}};
  // The step's size is used, not the job's.
  EXPECT_EQ(read_launch_ranks(variables(all))->world_size, 3);
  all.insert({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}});
  EXPECT_EQ(read_launch_ranks(variables(all))->launcher, "Open MPI");
  all.insert({{"RANK", "6"}, {"WORLD_SIZE", "7"}});
  EXPECT_EQ(read_launch_ranks(variables(all))->rank, 6);
}

TEST(LaunchRanks, NoLauncher_IsNothing) {
  EXPECT_FALSE(read_launch_ranks(variables({{"MASTER_ADDR", "host"}})));
  EXPECT_FALSE(read_launch_ranks(variables({{"SLURM_NTASKS", "4"}})));
}

TEST(LaunchRanks, Incomplete_MessageNamesWhatIsMissing) {
  EXPECT_TRUE(mentions(message_of([] { read_launch_ranks(variables({{"RANK", "0"}})); }),
                       {"RANK is set but WORLD_SIZE is not"}));
  EXPECT_TRUE(mentions(message_of([] { read_launch_ranks(variables({{"WORLD_SIZE", "2"}})); }),
                       {"WORLD_SIZE is set but RANK is not"}));
  EXPECT_TRUE(
      mentions(message_of([] { read_launch_ranks(variables({{"OMPI_COMM_WORLD_RANK", "0"}})); }),
               {"OMPI_COMM_WORLD_SIZE is not"}));
}

TEST(LaunchRanks, Malformed_MessageNamesVariableAndValue) {
  for (const char* bad : {"two", "2x", " 2", "-1", "1.5", "99999999999999999999"}) {
    EXPECT_TRUE(mentions(
        message_of([&] { read_launch_ranks(variables({{"RANK", bad}, {"WORLD_SIZE", "4"}})); }),
        {"RANK", bad}));
  }
  EXPECT_TRUE(mentions(
      message_of([] { read_launch_ranks(variables({{"RANK", "0"}, {"WORLD_SIZE", "0"}})); }),
      {"WORLD_SIZE", "\"0\""}));
  EXPECT_TRUE(mentions(
      message_of([] { read_launch_ranks(variables({{"RANK", "4"}, {"WORLD_SIZE", "4"}})); }),
      {"RANK is 4", "WORLD_SIZE is 4", "0 to 3"}));
}

TEST(MasterAddress, Set_IsTaken) {
  const auto lookup = variables({{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "1234"}});
  const auto address = read_master_address(std::nullopt, lookup);
  EXPECT_EQ(address.host, "node7");
  EXPECT_EQ(address.port, 1234);
}

TEST(MasterAddress, Torchrun_Missing_MessageNamesTheVariable) {
  const auto none = variables({});
  EXPECT_TRUE(
      mentions(message_of([&] { read_master_address(std::nullopt, none); }), {"MASTER_ADDR"}));
  const auto no_port = variables({{"MASTER_ADDR", "h"}});
  EXPECT_TRUE(
      mentions(message_of([&] { read_master_address(std::nullopt, no_port); }), {"MASTER_PORT"}));
  const auto bad_port = variables({{"MASTER_ADDR", "h"}, {"MASTER_PORT", "70000"}});
  EXPECT_TRUE(mentions(message_of([&] { read_master_address(std::nullopt, bad_port); }),
                       {"MASTER_PORT", "70000"}));
}

TEST(MasterAddress, Slurm_FirstHostAndPortOfTheJob) {
  std::map<std::string, std::string> job = {{"SLURM_PROCID", "1"},
                                            {"SLURM_STEP_NUM_TASKS", "2"},
                                            {"SLURM_JOB_NODELIST", "gpu[07-09,12],login1"},
                                            {"SLURM_JOB_ID", "123456"}};
  const auto first = read_master_address(read_launch_ranks(variables(job)), variables(job));
  EXPECT_EQ(first.host, "gpu07");
  EXPECT_GT(first.port, 1024);
  job["SLURM_JOB_ID"] = "123457";
  EXPECT_NE(read_master_address(read_launch_ranks(variables(job)), variables(job)).port,
            first.port);
  job["MASTER_ADDR"] = "other";
  job["MASTER_PORT"] = "777";
  const auto given = read_master_address(read_launch_ranks(variables(job)), variables(job));
  EXPECT_EQ(given.host, "other");
  EXPECT_EQ(given.port, 777);
}

TEST(MasterAddress, Mpi_OneMachineIsLocalSeveralNeedTheVariable) {
  std::map<std::string, std::string> job = {{"OMPI_COMM_WORLD_RANK", "1"},
                                            {"OMPI_COMM_WORLD_SIZE", "2"},
                                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  const auto local = read_master_address(read_launch_ranks(variables(job)), variables(job));
  EXPECT_EQ(local.host, "127.0.0.1");
  EXPECT_EQ(local.port, 29500);
  job["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  EXPECT_TRUE(mentions(
      message_of([&] { read_master_address(read_launch_ranks(variables(job)), variables(job)); }),
      {"MASTER_ADDR"}));
}

TEST(MasterAddress, SlurmNodeList_EveryForm_GivesTheFirst) {
  const auto host_of = [](const std::string& list) {
    const auto lookup = variables(
        {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NODELIST", list}});
    return read_master_address(read_launch_ranks(lookup), lookup).host;
  };
  EXPECT_EQ(host_of("node1"), "node1");
  EXPECT_EQ(host_of("node1,node2"), "node1");
  EXPECT_EQ(host_of("node[3-5]"), "node3");
  EXPECT_EQ(host_of("node[003,007]"), "node003");
  EXPECT_EQ(host_of("rack[1-2]n[01-16].site,x"), "rack1n01.site");
  for (const char* bad : {"", ",a", "node[", "node[]", "node[1-2", "node]"}) {
    EXPECT_THROW(host_of(bad), InvalidArgument) << bad;
  }
}

TEST(InitMethods, EveryForm_IsUnderstood) {
  EXPECT_FALSE(parse_init_method("env://"));
  const auto tcp = parse_init_method("tcp://node-1:2950");
  EXPECT_EQ(tcp->host, "node-1");
  EXPECT_EQ(tcp->port, 2950);
  EXPECT_EQ(parse_init_method("tcp://[fe80::1]:80")->host, "fe80::1");
}

TEST(InitMethods, Malformed_MessageShowsIt) {
  for (const char* bad :
       {"", "env", "env://x", "tcp://host", "tcp://:80", "tcp://host:", "tcp://host:-1",
        "tcp://host:70000", "file:///tmp/file", "http://host:80", "tcp://host:80?rank=1"}) {
    EXPECT_TRUE(mentions(message_of([&] { parse_init_method(bad); }), {bad})) << bad;
  }
}

TEST(Backends, EveryForm_IsUnderstood) {
  constexpr auto kCpu = c10::DeviceType::CPU, kCuda = c10::DeviceType::CUDA;
  using Entries = std::vector<std::pair<c10::DeviceType, std::string>>;
  const std::map<std::string, Entries> cases{
      {"gloo", {{kCpu, "gloo"}, {kCuda, "gloo"}}},
      {"nccl", {{kCuda, "nccl"}}},
      {"apex", {{kCpu, "apex"}}},
      {"cpu:apex", {{kCpu, "apex"}}},
      {"cuda:gloo", {{kCuda, "gloo"}}},
      {"cpu:gloo,cuda:nccl", {{kCpu, "gloo"}, {kCuda, "nccl"}}},
  };
  for (const auto& [text, expected] : cases) {
    Entries entries;
    for (const DeviceBackend& one : parse_backend(text))
      entries.emplace_back(one.device, one.backend);
    EXPECT_EQ(entries, expected) << text;
  }
}

TEST(Backends, Unknown_MessageShowsItAndWhatThereIs) {
  for (const char* bad : {"mpi", "", "cpu:mpi", "xpu:gloo", "cpu:nccl", "cuda:apex",
                          "cpu:gloo,cpu:gloo", "cpu:gloo,", ",cuda:nccl"}) {
    EXPECT_TRUE(mentions(message_of([&] { parse_backend(bad); }),
                         {std::string("\"") + bad + "\" is not supported", "cpu:gloo,cuda:nccl"}));
  }
}

TEST(Gpus, LocalRank_PicksItsOwn) {
  const auto none = variables({});
  EXPECT_EQ(choose_gpu(0, 8, none), 0);
  EXPECT_EQ(choose_gpu(7, 8, none), 7);
  // One GPU per task, as with srun --gpus-per-task=1.
  EXPECT_EQ(choose_gpu(3, 1, variables({{"CUDA_VISIBLE_DEVICES", "3"}})), 0);
}

TEST(Gpus, TooFew_MessageSaysHowMany) {
  EXPECT_TRUE(
      mentions(message_of([] { choose_gpu(0, 0, variables({{"CUDA_VISIBLE_DEVICES", "-1"}})); }),
               {"sees none", "CUDA_VISIBLE_DEVICES is \"-1\""}));
  EXPECT_TRUE(
      mentions(message_of([] { choose_gpu(2, 2, variables({})); }), {"local rank 2", "only 2"}));
  EXPECT_TRUE(mentions(message_of([] { choose_gpu(1, 1, variables({})); }), {"only 1"}));
}

}  // namespace
}  // namespace apex::distributed
