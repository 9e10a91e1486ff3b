// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <torch/data/samplers/distributed.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <apex/amp/loss_scaler.h>
#include <apex/distributed/collectives.h>
#include <apex/distributed/process_group.h>
#include <apex/error.h>
#include <apex/parallel/checkpoint.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/distributed_data_parallel.h>
#include <apex/parallel/larc.h>
#include <support/processes.h>

// Complete training checkpoints on two processes.

namespace {

namespace fs = std::filesystem;
using apex::parallel::Checkpoint;
using apex::parallel::DistributedDataParallel;
using apex::testing::require;
using torch::data::samplers::DistributedRandomSampler;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width = 8) {
    fc1 = register_module("fc1", torch::nn::Linear(4, width));
    fc2 = register_module("fc2", torch::nn::Linear(width, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::tanh(fc1(x))); }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

/// A training run that can be stopped after any step.
struct Run {
  Run()
      : model(Net()),
        optimizer(model.parameters(), 0.05),
        scaler(apex::amp::LossScalerOptions(64).growth_interval(3)),
        sampler(40, 2, static_cast<size_t>(apex::distributed::rank())),
        checkpoint(model) {
    checkpoint.optimizer(optimizer).scaler(scaler).sampler(sampler);
  }

  void train(int steps) {
    const at::Tensor data = at::sin(at::arange(160, at::kFloat).view({40, 4}));
    for (int step = 0; step < steps; ++step) {
      const auto batch = *sampler.next(4);
      const at::Tensor rows =
          at::tensor(std::vector<int64_t>(batch.begin(), batch.end()), at::kLong);
      optimizer.zero_grad();
      scaler.scale(model(data.index_select(0, rows)).square().mean()).backward();
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
  DistributedRandomSampler sampler;
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
  torch::manual_seed(1);
  Run whole;
  require(whole.checkpoint.resume(path) == 0, "there is no checkpoint yet");
  whole.train(2);
  whole.checkpoint.save(path, 2);
  whole.train(2);

  torch::manual_seed(2);
  Run resumed;
  require(resumed.checkpoint.resume(path) == 2, "another step");
  require(resumed.scaler.growth_tracker() == 2, "the scaler's state is lost");
  resumed.train(2);
  require(resumed.parameters().equal(whole.parameters()), "another run");
  require(resumed.scaler.get_scale() == whole.scaler.get_scale(), "another scale");
  require(resumed.sampler.index() == whole.sampler.index(), "other samples");

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
         "not a regular file");

  // A path that is not a file is left alone, and opening it does not block; a link stays a link.
  const std::string fifo = (folder / "fifo").string(), link = (folder / "link").string();
  const std::string dangling = (folder / "dangling").string(), loop = (folder / "loop").string();
  if (first) {
    require(::mkfifo(fifo.c_str(), 0600) == 0, "no fifo");
    fs::create_symlink("run.ckpt", link);
    fs::create_symlink("later.ckpt", dangling);
    fs::create_symlink("loop", loop);
    fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
  }
  apex::distributed::barrier();
  expect(error_of([&] { run.checkpoint.load(fifo); }), fifo, "not a regular file");
  expect(error_of([&] { run.checkpoint.save(fifo, 8); }), fifo, "not a regular file");
  require(fs::is_fifo(fifo), "the fifo was replaced");
  run.checkpoint.save(link, 8);
  require(fs::is_symlink(link), "the link was replaced");
  require(run.checkpoint.load(path) == 8, "the link does not lead to what was saved");
  run.checkpoint.save(dangling, 8);
  require(fs::is_symlink(dangling), "the dangling link was replaced");
  require(run.checkpoint.load((folder / "later.ckpt").string()) == 8, "not saved at the target");
  expect(error_of([&] { run.checkpoint.save(loop, 8); }), loop, "symbolic links");
  require((fs::status(path).permissions() & fs::perms::group_read) == fs::perms::none,
          "others may read it now");

  // Only one rank calls it.
  const std::string uneven = (folder / "uneven.ckpt").string();
  expect(error_of([&] { Checkpoint(run.model).save(uneven, first ? 1 : -1); }), "save()",
         "the step of rank 1 is -1; it must not be negative");
  Checkpoint with(run.model);
  if (first) with.sampler(run.sampler);
  expect(error_of([&] { with.save(uneven, 1); }), "save()",
         "rank 1 has no sampler, but rank 0 does");
  Checkpoint scaled(run.model), stepped(run.model);
  apex::amp::LossScaler scaler;
  if (!first) scaled.scaler(scaler);
  expect(error_of([&] { scaled.save(uneven, 1); }), "save()",
         "rank 1 has a scaler, but rank 0 does not; pass one on every rank or on none");
  if (!first) stepped.optimizer(run.optimizer);
  expect(error_of([&] { stepped.save(uneven, 1); }), "save()",
         "rank 1 has 1 optimizers, but rank 0 has 0; pass the same number on every rank");
  const auto save_or_load = [&] {
    first ? Checkpoint(run.model).save(uneven, 1) : void(Checkpoint(run.model).load(path));
  };
  expect(error_of(save_or_load), "Checkpoint", "rank 1 is in load(), but rank 0 in save()");
  require(!fs::exists(uneven), "it was written");
  expect(error_of([&] { scaled.load(path); }), "load()", "rank 1 has a scaler");
  expect(error_of([&] { scaled.resume(uneven); }), "load()", "rank 1 has a scaler");

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
  // Optimizers of another class, or with other parameters.
  torch::optim::SGD sgd(run.model.parameters(), 0.1);
  apex::parallel::LARC larc(torch::optim::SGD(run.model.parameters(), 0.1));
  torch::optim::Adam groups({run.model->fc1->parameters(), run.model->fc2->parameters()});
  const std::string kinds = (folder / "kinds.ckpt").string();
  Checkpoint(run.model).optimizer(run.optimizer).save(kinds, 0);
  for (torch::optim::Optimizer* const wrong :
       std::initializer_list<torch::optim::Optimizer*>{&sgd, &larc, &groups}) {
    expect(error_of([&] { Checkpoint(run.model).optimizer(*wrong).load(kinds); }), kinds,
           std::string("its optimizer0 is torch::optim::Adam of 4 parameters, but in this "
                       "program it is torch::optim::") +
               (wrong == &groups ? "Adam of 2 and 2" : "SGD of 4") +
               " parameters: pass the saved optimizers");
  }
  require(sgd.state().empty() && groups.state().empty(), "the state was loaded in part");
  Checkpoint(run.model).optimizer(larc).save(kinds, 3);
  require(Checkpoint(run.model).optimizer(sgd).load(kinds) == 3, "LARC's is the wrapped one's");
  require(run.parameters().equal(parameters), "changed by what was refused");

  // Names of the maximum length, which leave no room for the suffix of a temporary file.
  const std::string longest = (folder / std::string(255, 'n')).string();
  run.checkpoint.save(longest, 5);
  require(run.checkpoint.load(longest) == 5, "another step");
  const std::string longer = (folder / std::string(256, 'n')).string();
  expect(error_of([&] { run.checkpoint.save(longer, 5); }), longer, "File name too long");
  expect(error_of([&] { run.checkpoint.load(longer); }), longer, "File name too long");

  // Samplers saved with another number of ranks.
  const auto alone = apex::distributed::new_group({0});
  if (first) {
    Checkpoint(run.model).sampler(run.sampler).process_group(alone).save(other, 0);
  }
  expect(error_of([&] { Checkpoint(run.model).sampler(run.sampler).load(other); }), other,
         "the samplers of 1 ranks, but this job has 2");
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
    apex::distributed::destroy_process_group();  // does not join threads that do not exist
    const bool refused = error.find("was forked") != std::string::npos;
    ::_exit(refused && !apex::distributed::is_initialized() ? 0 : 1);
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
