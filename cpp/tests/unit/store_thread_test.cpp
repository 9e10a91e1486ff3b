// SPDX-License-Identifier: BSD-3-Clause

#include "watch/store_thread.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace apex::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::minutes;

StorePtr prefixed(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

/// A client, and the group that it is of.
struct Client {
  explicit Client(const StorePtr& store)
      : group(c10::make_intrusive<c10d::ProcessGroup>(store, 0, 1)),
        client(std::make_shared<StoreClient>(*group)) {}
  StoreClient* operator->() const { return client.get(); }
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<StoreClient> client;
};

Client client_of(const StorePtr& store) { return Client(store); }

/// A store whose host process is stopped until `go`.
class StoppedStore final : public c10d::HashStore {
 public:
  int64_t add(const std::string& key, int64_t value) override {
    while (!go) std::this_thread::yield();
    return HashStore::add(key, value);
  }
  std::atomic<bool> go{false};
};

TEST(StoreThread, GroupsOfOneStore_ShareIt) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto thread = StoreThread::of(prefixed("a", prefixed("b", store)));
  EXPECT_EQ(StoreThread::of(store), thread);
  EXPECT_NE(StoreThread::of(c10::make_intrusive<c10d::HashStore>()), thread);
}

// A blocked call on the user's connection would block the user's own calls.
TEST(StoreThread, ServerWithPrefixes_IsReachedByOneConnectionOfItsOwn) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const StorePtr server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::vector<const c10d::Store*> connections;
  for (const StorePtr& store :
       {server, prefixed("a", server), prefixed("b", prefixed("a", server))}) {
    const auto client = client_of(store);
    const auto ask = [&](c10d::Store& view) {
      const StorePtr own = StorePtr::reclaim_copy(&view);
      auto* const with_prefix = dynamic_cast<c10d::PrefixStore*>(&view);
      connections.push_back(with_prefix ? with_prefix->getUnderlyingNonPrefixStore().get() : &view);
      EXPECT_EQ(view.get_to_str("key"), "value");
    };
    store->set("key", "value");
    EXPECT_TRUE(client->call(ask, Clock::now() + minutes(1)));
    const auto kept = StoreThread::of(server);
    EXPECT_NE(connections.back(), server.get());
  }
}

// A file store removes its file when as many stores on it were destroyed as there are ranks.
TEST(StoreThread, File_IsUsedItself) {
  const std::string path = ::testing::TempDir() + "apex_store_thread_test";
  const StorePtr file = c10::make_intrusive<c10d::FileStore>(path, 1);
  for (const StorePtr& store : {file, prefixed("a", file)}) {
    const c10d::Store* used = nullptr;
    EXPECT_TRUE(client_of(store)->call([&](c10d::Store& view) { used = &view; },
                                       Clock::now() + minutes(1)));
    EXPECT_EQ(used, store.get());
  }
}

TEST(StoreThread, Calls_RunInOrderAndErrorsAreTheCallers) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto client = client_of(store);
  std::string order;
  client->post([&](c10d::Store&) { order += 'a'; });
  const auto bad = client->post([&](c10d::Store&) { throw std::runtime_error("b"); });
  EXPECT_TRUE(client->call([&](c10d::Store&) { order += 'c'; }, Clock::now() + minutes(1)));
  EXPECT_EQ(order, "ac");
  EXPECT_THROW(bad.get(), std::runtime_error);
}

TEST(StoreThread, StoreIsStopped_CallerIsNotHeldUpAndTheCallIsMadeLater) {
  const auto store = c10::make_intrusive<StoppedStore>();
  const auto client = client_of(store);
  EXPECT_FALSE(client->call([](c10d::Store& view) { view.add("key", 1); }, Clock::now()));
  store->go = true;
  int64_t count = 0;
  EXPECT_TRUE(client->call([&](c10d::Store& view) { count = view.add("key", 0); },
                           Clock::now() + minutes(1)));
  EXPECT_EQ(count, 1);
}

/// A proxy in front of a server that lets a test cut its connections.
class Relay {
 public:
  explicit Relay(uint16_t to) : to_(to), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = loopback(0);
    socklen_t length = sizeof(address);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(::listen(listener_, 16), 0);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~Relay() {
    ::shutdown(listener_, SHUT_RDWR);
    accepting_.join();
    cut();
    for (std::thread& copying : copying_) copying.join();
    for (const int end : ends_) ::close(end);
    ::close(listener_);
  }
  uint16_t port() const { return port_; }
  void cut() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const int end : ends_) ::shutdown(end, SHUT_RDWR);
  }

 private:
  static sockaddr_in loopback(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }
  void accept_all() {
    for (int client = 0; (client = ::accept(listener_, nullptr, nullptr)) >= 0;) {
      const int server = ::socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in address = loopback(to_);
      EXPECT_EQ(::connect(server, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_.insert(ends_.end(), {client, server});
      copying_.emplace_back(copy, client, server);
      copying_.emplace_back(copy, server, client);
    }
  }
  static void copy(int from, int to) {
    char bytes[4096];
    for (ssize_t length = 0; (length = ::recv(from, bytes, sizeof(bytes), 0)) > 0;) {
      if (::send(to, bytes, static_cast<size_t>(length), MSG_NOSIGNAL) != length) break;
    }
    ::shutdown(to, SHUT_RDWR);
  }

  const uint16_t to_;
  const int listener_;
  uint16_t port_ = 0;
  std::mutex mutex_;  ///< guards what follows
  std::vector<int> ends_;
  std::vector<std::thread> copying_;
  std::thread accepting_;
};

c10::intrusive_ptr<c10d::TCPStore> tcp_store(uint16_t port, bool is_server) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = is_server;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

// Without a new connection, the rank would receive no reports and appear silent.
TEST(StoreThread, ConnectionIsCut_IsMadeAgain) {
  const auto server = tcp_store(0, true);
  Relay relay(server->getPort());
  const StorePtr store = prefixed("a", tcp_store(relay.port(), false));
  const auto client = client_of(store);
  const auto count = [&] {
    const auto number = std::make_shared<int64_t>(0);
    EXPECT_TRUE(client->call([number](c10d::Store& view) { *number = view.add("key", 1); },
                             Clock::now() + minutes(1)));
    return *number;
  };
  EXPECT_EQ(count(), 1);
  for (int64_t time = 2; time < 4; ++time) {
    relay.cut();
    EXPECT_EQ(count(), time);
  }
}

// A new job's rank 0 would use a server that has the keys of the last job.
TEST(StoreThread, Server_EndsWithItsLastOwner) {
  StorePtr server = tcp_store(0, true);
  const uint16_t port = static_cast<const c10d::TCPStore&>(*server).getPort();
  auto client = client_of(prefixed("a", server));
  EXPECT_TRUE(
      client->call([](c10d::Store& view) { view.add("key", 1); }, Clock::now() + minutes(1)));
  server.reset();
  client.group.reset();
  const auto again = tcp_store(port, true);  // throws if the port is in use
  EXPECT_EQ(again->add("a/key", 0), 0);
  EXPECT_FALSE(client->call([](c10d::Store&) {}, Clock::now() + minutes(1)));
}

// The next job would find the keys of the last one in the file.
TEST(StoreThread, File_IsRemovedWithTheGroup) {
  const std::string path = ::testing::TempDir() + "apex_store_thread_test_removed";
  auto client = client_of(prefixed("a", c10::make_intrusive<c10d::FileStore>(path, 1)));
  EXPECT_TRUE(
      client->call([](c10d::Store& view) { view.add("key", 1); }, Clock::now() + minutes(1)));
  EXPECT_TRUE(std::filesystem::exists(path));
  client.group.reset();
  // The thread may still hold the store for a moment.
  for (const auto until = Clock::now() + minutes(1);
       std::filesystem::exists(path) && Clock::now() < until;)
    std::this_thread::yield();
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_FALSE(client->is_there());
  EXPECT_FALSE(client->call([](c10d::Store&) {}, Clock::now() + minutes(1)));
}

}  // namespace
}  // namespace apex::parallel
