// SPDX-License-Identifier: BSD-3-Clause
#include <apex/distributed.h>

#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/cuda.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <apex/distributed/detail/launch_environment.h>
#include <apex/error.h>

#include "comm/collectives.h"
#include "comm/separate_group.h"
#include "distributed/backends.h"
#include "error_text.h"
#include "transport/host_backend.h"
#include "watch/watched_group.h"

/// The version of libtorch at run time; null if libtorch does not have this function.
extern "C" __attribute__((weak)) uint64_t aoti_torch_abi_version();

namespace apex::distributed {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using BackendType = c10d::ProcessGroup::BackendType;

constexpr std::chrono::minutes kDefaultTimeout{30};
constexpr std::chrono::minutes kDefaultNcclTimeout{10};

/// State of init_process_group().
struct World {
  Group group;
  /// The default group's store; those of other groups are nested in it.
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<DeviceBackend> backends;
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<int> local_rank;  // of the options or the launcher
  int device_index = -1;          // -1: no GPU was set
  int next_name = 1;
  std::vector<Group> subgroups;
};

// Note [Groups at process end]
// A program may exit without destroy_process_group(). If the last reference to a group dropped with
// the static objects, its threads would end after parts of libtorch that they need are gone, and
// its destructor could wait for a collective that other ranks never join. So the slot that holds
// the default group and its subgroups is never destroyed, and its contents end with the process.
//
// world_mutex() guards the slot, including its device_index. init_process_group(), new_group() and
// destroy_process_group() lock meeting_mutex() first and hold it until they return; they change the
// slot under both mutexes. So other threads may use existing groups while ranks meet. Another rank
// may wait for that use before it joins the meeting.
std::mutex& meeting_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::mutex& world_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::unique_ptr<World>& world_slot() {
  static auto* slot = new std::unique_ptr<World>;
  return *slot;
}

// The layout of libtorch's objects differs between minor versions, so code built for another
// version would corrupt memory.
void require_same_torch() {
  if (aoti_torch_abi_version == nullptr) return;
  const uint64_t version = aoti_torch_abi_version();
  const uint64_t major = version >> 56, minor = (version >> 48) & 0xff;
  if (major == TORCH_VERSION_MAJOR && minor == TORCH_VERSION_MINOR) return;
  throw Error("apex was built for libtorch " + std::to_string(TORCH_VERSION_MAJOR) + "." +
              std::to_string(TORCH_VERSION_MINOR) + " but runs with " + std::to_string(major) +
              "." + std::to_string(minor) +
              ": rebuild apex and this program against the libtorch that they run with");
}

World& require_world() {
  if (!world_slot())
    throw InvalidArgument(
        "there is no default process group: call apex::distributed::init_process_group() first");
  return *world_slot();
}

/// Backends are in the order of parse_backend(): that of CUDA is the last.
bool uses_nccl(const std::vector<DeviceBackend>& backends) {
  return backends.back().backend == "nccl";
}

std::chrono::milliseconds resolve_timeout(const std::optional<std::chrono::milliseconds>& timeout,
                                          const std::vector<DeviceBackend>& backends) {
  if (!timeout) return uses_nccl(backends) ? kDefaultNcclTimeout : kDefaultTimeout;
  if (timeout->count() <= 0)
    throw InvalidArgument("the timeout is " + std::to_string(timeout->count()) +
                          " ms, but it must be positive");
  return std::min<std::chrono::milliseconds>(*timeout, kLongestTimeout);
}

/// Makes a GPU the current device and returns its index: that of the local rank, if it is known.
/// Hosts may have fewer GPUs than the job has ranks.
int use_gpu(const std::optional<int>& local_rank, int rank) {
  require_nccl();
  const int gpus = torch::cuda::device_count();
  const int gpu = choose_gpu(local_rank.value_or(rank % std::max(gpus, 1)), gpus);
  c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(
      at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)));
  return gpu;
}

BackendType type_of(const std::string& backend) {
  if (backend == "nccl") return BackendType::NCCL;
  return backend == "gloo" ? BackendType::GLOO : BackendType::CUSTOM;
}

c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& backend,
                                               const BackendRequest& request) {
  if (backend == "nccl") return make_nccl_backend(request);
  if (backend == "gloo") return make_gloo_backend(request);
  return parallel::make_host_backend(request);
}

// Note [Store layout]
// torch.distributed stores the keys of a backend under "default_pg" (default group only), then
// "<group name>/", then "<device>/". The default group is named "0", later groups by their number,
// and a backend for all devices is stored under the first device. This function uses the same
// nesting, so that C++ and Python ranks find each other. Each PrefixStore adds a "/".
Group connect_group(const std::string& who, const std::string& name, const std::string& description,
                    const c10::intrusive_ptr<c10d::Store>& job_store,
                    const std::vector<DeviceBackend>& backends, BackendRequest request) try {
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name + "/", job_store);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, request.rank, request.size);
  group->setDefaultBackend(uses_nccl(backends) ? BackendType::NCCL
                                               : type_of(backends.front().backend));
  request.group_name = name;
  const bool one_backend = backends.front().backend == backends.back().backend;
  c10::intrusive_ptr<c10d::Backend> backend;
  for (const DeviceBackend& entry : backends) {
    if (!backend || !one_backend) {
      request.store = c10::make_intrusive<c10d::PrefixStore>(
          entry.device == c10::DeviceType::CPU ? "cpu/" : "cuda/", store);
      backend = make_backend(entry.backend, request);
    }
    group->setBackend(entry.device, type_of(entry.backend), backend);
  }
  group->setGroupName(name);
  group->setGroupDesc(description);
  // From here on, also a process that was forked from this one is known.
  if (backends.front().backend == "apex") parallel::host_backend_of(*group);
  parallel::watched(*group);
  c10d::register_process_group(name, group);
  return group;
} catch (const Error&) {
  throw;
} catch (const std::exception&) {
  throw CommunicationError(
      who + " could not connect to the " + std::to_string(request.size) +
      " ranks of its group within " + std::to_string(request.timeout.count()) +
      " ms: check that all of them were started with the same world size and backend, that none "
      "has failed, and that the hosts can reach each other (GLOO_SOCKET_IFNAME or "
      "NCCL_SOCKET_IFNAME choose the network interface) (" +
      parallel::first_line_of(std::current_exception()) + ")");
}

/// The place of this process in the job.
struct Place {
  int rank = 0;
  int size = 1;
  MasterAddress master;
  bool agent_store = false;  ///< torchrun's agent hosts the store, so rank 0 is a client as well

  std::string describe() const {
    return parallel::rank_of(rank, size) + " at tcp://" + master.host + ":" +
           std::to_string(master.port);
  }
};

/// From the options or the launcher.
Place find_place(const ProcessGroupOptions& options, const std::optional<LaunchRanks>& launched) {
  const auto address = parse_init_method(options.init_method());
  if (options.rank().has_value() != options.world_size().has_value())
    throw InvalidArgument(
        "options.rank and options.world_size must be set together: set both or neither");
  if (!options.rank() && !launched)
    throw InvalidArgument(
        "RANK and WORLD_SIZE are not set: start the program with torchrun --no-python, srun or "
        "mpirun, set both variables, or pass options.rank and options.world_size");
  Place place;
  place.rank = options.rank() ? *options.rank() : launched->rank;
  place.size = options.world_size() ? *options.world_size() : launched->world_size;
  if (place.size < 1 || place.rank < 0 || place.rank >= place.size)
    throw InvalidArgument("the rank is " + std::to_string(place.rank) + " and the world size is " +
                          std::to_string(place.size) +
                          ": ranks go from 0 to the world size minus 1");
  place.master = address ? *address : read_master_address(launched);
  // torchrun's agent listens at its own address only.
  place.agent_store = process_environment("TORCHELASTIC_USE_AGENT_STORE") == "True" &&
                      process_environment("MASTER_ADDR") == place.master.host &&
                      process_environment("MASTER_PORT") == std::to_string(place.master.port);
  return place;
}

/// The likely cause and the remedy, from the message of libtorch's store.
std::string advice(const std::string& message, const Place& place) {
  const auto says = [&](const char* part) { return message.find(part) != std::string::npos; };
  const std::string port = std::to_string(place.master.port);
  if (says("EADDRINUSE") || says("address already in use")) {
    return "port " + port +
           " is in use on this host: set MASTER_PORT to a free port on every rank, and start only "
           "one process as rank 0";
  }
  if (says("waiting for clients")) {
    return "not every rank joined: check that " + std::to_string(place.size) +
           " processes were started and that they can reach this host";
  }
  if (says("Ping failed")) {
    return "another program listens at " + place.master.host + ":" + port +
           ": set MASTER_PORT to a free port on every rank";
  }
  return "the store of rank 0 does not answer: check that MASTER_ADDR and MASTER_PORT are those of "
         "this job and that rank 0 is alive";
}

/// Rank 0 hosts the store unless an agent does. Blocks for at most the timeout.
c10::intrusive_ptr<c10d::Store> connect_store(const Place& place,
                                              std::chrono::milliseconds timeout) try {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(place.master.port);
  options.isServer = place.rank == 0 && !place.agent_store;
  options.numWorkers = place.size;
  options.timeout = timeout;
  options.multiTenant = !place.agent_store;
  options.useLibUV = process_environment("USE_LIBUV").value_or("1") == "1";
  return c10::make_intrusive<c10d::TCPStore>(place.master.host, options);
} catch (const std::exception&) {
  const std::string message = parallel::first_line_of(std::current_exception());
  throw CommunicationError(place.describe() + " could not join within " +
                           std::to_string(timeout.count()) + " ms: " + advice(message, place) +
                           " (" + message + ")");
}

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(const std::string& backend,
                                                          const ProcessGroupOptions& options) {
  require_same_torch();
  const std::lock_guard<std::mutex> meeting(meeting_mutex());
  if (is_initialized())
    throw InvalidArgument(
        "init_process_group() was called twice: call destroy_process_group() in between");
  auto world = std::make_unique<World>();
  world->backends = parse_backend(backend);
  world->timeout = options.timeout();
  const auto launched = read_launch_ranks();
  const Place place = find_place(options, launched);

  std::optional<int> local = options.local_rank();
  if (!local && launched) local = launched->local_rank;
  world->local_rank = local;
  if (uses_nccl(world->backends)) {
    world->device_index =
        use_gpu(options.device_index() ? options.device_index() : local, place.rank);
  }

  BackendRequest request;
  request.rank = place.rank;
  request.size = place.size;
  request.timeout = resolve_timeout(options.timeout(), world->backends);
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>("default_pg", connect_store(place, request.timeout));
  world->group =
      connect_group(place.describe(), "0", "default_pg", store, world->backends, request);
  world->store = c10::make_intrusive<c10d::PrefixStore>("0/", store);
  const std::lock_guard<std::mutex> lock(world_mutex());
  world_slot() = std::move(world);
  return world_slot()->group;
}

c10::intrusive_ptr<c10d::ProcessGroup> new_group(const std::vector<int>& ranks,
                                                 const std::string& backend,
                                                 std::optional<std::chrono::milliseconds> timeout) {
  const std::lock_guard<std::mutex> meeting(meeting_mutex());
  World& world = require_world();
  const int self = world.group->getRank();
  std::vector<int> members = ranks;
  std::sort(members.begin(), members.end());
  if (members.empty()) throw InvalidArgument("new_group() needs at least one rank");
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] < 0 || members[i] >= world.group->getSize())
      throw InvalidArgument("new_group(): rank " + std::to_string(members[i]) +
                            " is not in the world of size " +
                            std::to_string(world.group->getSize()));
    if (i > 0 && members[i] == members[i - 1])
      throw InvalidArgument("new_group(): rank " + std::to_string(members[i]) + " is listed twice");
  }
  const auto backends = backend.empty() ? world.backends : parse_backend(backend);
  BackendRequest request;
  request.timeout = resolve_timeout(timeout ? timeout : world.timeout, backends);
  if (uses_nccl(backends) && world.device_index < 0) {
    const int gpu = use_gpu(world.local_rank, self);
    const std::lock_guard<std::mutex> lock(world_mutex());
    world.device_index = gpu;
  }
  // Every rank counts, also ranks that are not members, so that names agree.
  const std::string name = std::to_string(world.next_name++);
  const auto position = std::find(members.begin(), members.end(), self);
  if (position == members.end()) {
    return {};
  }
  request.rank = static_cast<int>(position - members.begin());
  request.size = static_cast<int>(members.size());
  request.global_ranks.assign(members.begin(), members.end());
  auto group = connect_group("rank " + std::to_string(self), name, "undefined", world.store,
                             backends, request);
  world.subgroups.push_back(group);
  return group;
}

c10::intrusive_ptr<c10d::ProcessGroup> new_group() {
  std::vector<int> ranks(static_cast<size_t>(get_default_group()->getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return new_group(ranks);
}

bool is_launched() { return read_launch_ranks().has_value(); }

bool is_initialized() {
  const std::lock_guard<std::mutex> lock(world_mutex());
  return world_slot() != nullptr;
}

c10::intrusive_ptr<c10d::ProcessGroup> get_default_group() {
  const std::lock_guard<std::mutex> lock(world_mutex());
  return require_world().group;
}

int rank(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group ? group->getRank() : get_default_group()->getRank();
}

int world_size(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group ? group->getSize() : get_default_group()->getSize();
}

int local_rank() {
  const std::lock_guard<std::mutex> lock(world_mutex());
  const World& world = require_world();
  return world.local_rank.value_or(world.group->getRank());
}

void barrier(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const Group target = group ? group : get_default_group();
  c10d::BarrierOptions options;
  {
    const std::lock_guard<std::mutex> lock(world_mutex());
    // Without device_ids, NCCL derives the GPU from the rank.
    if (world_slot() && world_slot()->device_index >= 0 &&
        target->getBackendType() == BackendType::NCCL) {
      options.device_ids = {world_slot()->device_index};
    }
  }
  constexpr const char* kWhat = "barrier()";
  parallel::require_own_process(*target);
  parallel::run_collective(kWhat, *target, [&] {
    return parallel::call_collective(kWhat, *target, [&] { return target->barrier(options); });
  });
}

void destroy_process_group() {
  const std::lock_guard<std::mutex> meeting(meeting_mutex());
  std::unique_ptr<World> world;
  {
    const std::lock_guard<std::mutex> lock(world_mutex());
    world = std::move(world_slot());
  }
  if (!world) return;
  // Newest first: a group may have been split from an older one.
  for (auto group = world->subgroups.rbegin(); group != world->subgroups.rend(); ++group) {
    c10d::unregister_process_group((*group)->getGroupName());
    (*group)->shutdown();
  }
  c10d::unregister_process_group(world->group->getGroupName());
  world->group->shutdown();
}

}  // namespace apex::distributed
