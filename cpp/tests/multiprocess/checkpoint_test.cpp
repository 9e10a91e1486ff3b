// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <apex/amp.h>
#include <apex/distributed.h>
#include <apex/error.h>
#include <apex/parallel/checkpoint.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/distributed_data_parallel.h>
#include <support/processes.h>

// Complete training checkpoints on two processes.

namespace {

namespace fs = std::filesystem;
using apex::parallel::Checkpoint;
using apex::parallel::DistributedDataParallel;
using apex::testing::require;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width = 8) {
    fc1 = register_module("fc1", torch::nn::Linear(4, width));
    fc2 = register_module("fc2", torch::nn::Linear(width, 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    return fc2(torch::dropout(torch::tanh(fc1(x)), 0.5, is_training()));
  }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

/// A training run that can be stopped after any step.
struct Run {
  Run()
      : model(Net()),
        optimizer(model.parameters(), 0.05),
        scaler(apex::amp::LossScalerOptions(64).growth_interval(3)),
        checkpoint(model) {
    checkpoint.optimizer(optimizer).scaler(scaler);
  }

  void train(int steps) {
    const at::Tensor data = at::sin(at::arange(160, at::kFloat).view({40, 4}));
    for (int end = done + steps; done < end; ++done) {
      torch::manual_seed(10 * done + apex::distributed::rank());
      optimizer.param_groups()[0].options().set_lr(done < 3 ? 0.05 : 0.005);
      const at::Tensor batch = data.narrow(0, 8 * done + 4 * apex::distributed::rank(), 4);
      optimizer.zero_grad();
      scaler.scale(model(batch).square().mean()).backward();
      scaler.step(optimizer);
      scaler.update();
    }
  }

  at::Tensor parameters() const {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& parameter : model.parameters()) flat.push_back(parameter.flatten());
    return at::cat(flat).detach();
  }

  DistributedDataParallel<Net> model;
  torch::optim::Adam optimizer;
  apex::amp::LossScaler scaler;
  int done = 0;
  Checkpoint checkpoint;
};

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const apex::Error& error) {
    return error.what();
  }
  return "no error";
}

/// Checks that an error names the file and the cause, in one line, on every rank.
void expect(const std::string& error, const std::string& path, const std::string& cause) {
  require(error.find(path) != std::string::npos && error.find(cause) != std::string::npos &&
              error.find('\n') == std::string::npos,
          "not one line with '" + path + "' and '" + cause + "': " + error);
}

/// Oracle: an uninterrupted run, bit for bit.
void stop_and_resume() {
  apex::distributed::init_process_group("gloo");
  const fs::path folder = std::getenv("TEST_FOLDER");
  const std::string path = (folder / "run.ckpt").string();
  torch::manual_seed(1 + apex::distributed::rank());
  Run whole;
  require(whole.checkpoint.resume(path) == 0, "there is no checkpoint yet");
  whole.train(2);
  whole.checkpoint.save(path, 2);
  whole.train(2);

  torch::manual_seed(2);
  Run resumed;
  resumed.done = static_cast<int>(resumed.checkpoint.resume(path));
  require(resumed.done == 2, "another step");
  require(resumed.scaler.growth_tracker() == 2, "the scaler's state is lost");
  resumed.train(2);
  require(resumed.parameters().equal(whole.parameters()), "another run");
  require(resumed.optimizer.defaults().get_lr() == 0.05 &&
              resumed.optimizer.param_groups()[0].options().get_lr() ==
                  whole.optimizer.param_groups()[0].options().get_lr(),
          "another learning rate");
  require(resumed.scaler.get_scale() == whole.scaler.get_scale(), "another scale");

  // With and without the wrapper, with fewer parts than were saved.
  Net alone;
  require(Checkpoint(alone).load(path) == 2, "a part of the checkpoint alone");
  apex::distributed::destroy_process_group();
  // One process, without a group.
  Net single;
  require(Checkpoint(*single).load(path) == 2 && single->fc1->weight.equal(alone->fc1->weight),
          "without a group");
}

/// Hazards: a failed write loses an older checkpoint; one rank throws and the others wait; a model
/// is partly loaded.
void bad_files() {
  apex::distributed::init_process_group("gloo");
  const bool first = apex::distributed::rank() == 0;
  const fs::path folder = std::getenv("TEST_FOLDER");
  const std::string path = (folder / "run.ckpt").string();
  Run run;
  run.train(1);
  run.checkpoint.save(path, 7);

  // The disk is full on rank 0.
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  if (first) {
    rlimit little = before;
    little.rlim_cur = 1000;
    ::setrlimit(RLIMIT_FSIZE, &little);
  }
  const std::string full = error_of([&] { run.checkpoint.save(path, 8); });
  if (first) ::setrlimit(RLIMIT_FSIZE, &before);
  expect(full, path, "File too large");
  expect(full, path, "rank 0: ");
  require(run.checkpoint.load(path) == 7, "the older checkpoint is gone");
  require(std::distance(fs::directory_iterator(folder), fs::directory_iterator()) == 1,
          "something was left behind");
  const std::string nowhere = (folder / "no" / "run.ckpt").string();
  expect(error_of([&] { run.checkpoint.save(nowhere, 8); }), nowhere, "No such file or directory");
  expect(error_of([&] { run.checkpoint.load(nowhere); }), nowhere, "No such file or directory");
  expect(error_of([&] { run.checkpoint.load(folder.string()); }), folder.string(),
         "cannot be read");

  // A truncated file, an empty one, and another kind of file.
  for (const auto size : {fs::file_size(path) / 2, uintmax_t{0}}) {
    const std::string part = (folder / ("part" + std::to_string(size))).string();
    if (first) {
      fs::copy_file(path, part);
      fs::resize_file(part, size);
    }
    expect(error_of([&] { run.checkpoint.load(part); }), part, "truncated, or is not a checkpoint");
  }
  const std::string foreign = (folder / "net.pt").string();
  if (first) torch::save(run.model, foreign);
  expect(error_of([&] { run.checkpoint.load(foreign); }), foreign, "not written by");

  // A checkpoint of another model, and one with other parts.
  const at::Tensor parameters = run.parameters();
  Net wide(9);
  torch::optim::Adam optimizer(wide->parameters());
  const std::string other = (folder / "wide.ckpt").string();
  Checkpoint(wide).optimizer(optimizer).save(other, 0);
  expect(error_of([&] { Checkpoint(run.model).optimizer(run.optimizer).load(other); }), other,
         "'fc1.weight' has shape [8, 4] and dtype Float in the model, but shape [9, 4] and dtype "
         "Float in the file");
  Net doubles;
  doubles->to(at::kDouble);
  Checkpoint(doubles).save(other, 0);
  expect(error_of([&] { Checkpoint(run.model).load(other); }), other,
         "and dtype Double in the file");
  Net narrow;
  Checkpoint(narrow).save(other, 0);
  expect(error_of([&] { run.checkpoint.load(other); }), other, "it has no optimizer0");
  // Optimizers with other parameters.
  torch::optim::Adam groups({run.model->fc1->parameters(), run.model->fc2->parameters()});
  const std::string kinds = (folder / "kinds.ckpt").string();
  Checkpoint(run.model).optimizer(run.optimizer).save(kinds, 0);
  expect(error_of([&] { Checkpoint(run.model).optimizer(groups).load(kinds); }), kinds,
         "different number of parameter groups");
  require(run.parameters().equal(parameters), "changed by what was refused");

  apex::distributed::destroy_process_group();
}

struct LongNames : torch::nn::Module {
  LongNames() {
    weight = register_parameter(std::string(300, 'w'), torch::ones({4, 1}));
    register_buffer(std::string(300, 'b'), torch::ones({2}));
    fc = register_module(std::string(300, 'm'), torch::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return fc(x).matmul(weight); }
  at::Tensor weight;
  torch::nn::Linear fc{nullptr};
};

/// Hazard: a name longer than a file name, or than its buffer, may be.
void long_names() {
  apex::distributed::init_process_group("gloo");
  struct Identity : apex::parallel::CommHook {
    std::string name() const override { return std::string(300, 'h'); }
    c10::intrusive_ptr<c10::ivalue::Future> run(apex::parallel::GradientBucket& bucket) override {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(fails ? at::empty({0}) : bucket.buffer);
      return future;
    }
    bool fails = false;
  };
  const std::string path = (fs::path(std::getenv("TEST_FOLDER")) / "names.ckpt").string();
  DistributedDataParallel model(
      std::make_shared<LongNames>(),
      apex::parallel::DistributedDataParallelOptions().broadcast_buffers(true));
  model.forward(torch::ones({1, 4})).sum().backward();
  require(model->weight.grad().defined(), "no gradient");
  Checkpoint(model).save(path, 1);
  require(Checkpoint(model).load(path) == 1, "another step");
  for (const int rank : {0, 1}) {  // each rank alone, with a file of its own
    const auto alone = apex::distributed::new_group({rank});
    const std::string own = path + std::to_string(rank);
    if (alone) Checkpoint(model).process_group(alone).save(own, 2);
    require(!alone || fs::exists(own), "not written: " + own);
  }
  const auto hook = std::make_shared<Identity>();
  model.register_comm_hook(hook);
  model.forward(torch::ones({1, 4})).sum().backward();
  hook->fails = true;
  const std::string error = error_of([&] { model.forward(torch::ones({1, 4})).sum().backward(); });
  require(error.find("hook '" + std::string(300, 'h') + "'") != std::string::npos, error);
  require(error.find("'" + std::string(300, 'w') + "'") != std::string::npos, error);
  apex::distributed::destroy_process_group();
}

/// Hazard: a forked child writes to its parent's connections, or waits on them.
void forked() {
  apex::distributed::init_process_group("gloo");
  // Before anything was sent, so that only the creation of the group identifies the owner.
  const pid_t early = ::fork();
  if (early == 0) {
    ::alarm(20);
    const std::string error = error_of([] { apex::distributed::all_reduce(torch::ones({2})); });
    ::_exit(error.find("was forked") != std::string::npos ? 0 : 1);
  }
  int early_status = 0;
  require(::waitpid(early, &early_status, 0) == early && early_status == 0,
          "the early child was not refused");
  const std::string path = (fs::path(std::getenv("TEST_FOLDER")) / "forked.ckpt").string();
  Run run;
  run.train(1);
  const pid_t child = ::fork();
  if (child == 0) {
    bool refused = true;
    for (const std::function<void()>& use : std::initializer_list<std::function<void()>>{
             [&] { run.checkpoint.save(path, 1); }, [&] { run.checkpoint.load(path); },
             [&] { apex::distributed::all_reduce(torch::ones({2})); },
             [&] { apex::distributed::broadcast(torch::ones({2})); },
             [&] { apex::distributed::barrier(); }, [&] { const auto guard = run.model.join(); }}) {
      const std::string error = error_of(use);
      if (error.find("was forked") == std::string::npos) std::cerr << error << std::endl;
      refused = refused && error.find("was forked") != std::string::npos;
    }
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  require(::waitpid(child, &status, 0) == child && status == 0, "the child was not refused");
  run.train(2);
  run.checkpoint.save(path, 3);
  require(run.checkpoint.load(path) == 3, "another step");
  apex::distributed::destroy_process_group();
}

const apex::testing::Scenario kForked("forked", forked);
const apex::testing::Scenario kLongNames("long_names", long_names);
const apex::testing::Scenario kStopAndResume("checkpoint_stop_and_resume", stop_and_resume);
const apex::testing::Scenario kBadFiles("checkpoint_bad_files", bad_files);

}  // namespace

namespace apex::testing {
namespace {

class CheckpointProcesses : public ::testing::Test {
 protected:
  CheckpointProcesses() {
    std::string name = (fs::temp_directory_path() / "apex_checkpoint_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~CheckpointProcesses() override { fs::remove_all(folder_); }

  std::string failures(const std::string& scenario) const {
    return failures_of(run_processes(ranks_of(scenario, 2, {{"TEST_FOLDER", folder_.string()}})));
  }

 protected:
  fs::path folder_;
};

TEST_F(CheckpointProcesses, Stopped_Resumed_TrainsAsIfItHadNotStopped) {
  EXPECT_EQ(failures("checkpoint_stop_and_resume"), "");
}

TEST_F(CheckpointProcesses, NamesOf300Characters_WrapperHookAndCheckpoint_Work) {
  EXPECT_EQ(failures("long_names"), "");
}

TEST_F(CheckpointProcesses, ForkedChild_AnyCollective_IsRefusedAndTheParentGoesOn) {
  for (const char* channel : {"1", "0"}) {
    EXPECT_EQ(
        failures_of(run_processes(ranks_of(
            "forked", 2, {{"TEST_FOLDER", folder_.string()}, {"APEX_HOST_CHANNEL", channel}}))),
        "");
  }
}

TEST_F(CheckpointProcesses, FullDiskTruncatedOrForeign_EveryRank_ThrowsOneLineWithTheFile) {
  EXPECT_EQ(failures("checkpoint_bad_files"), "");
}

}  // namespace
}  // namespace apex::testing
