// SPDX-License-Identifier: BSD-3-Clause
#include <distributed/tcp_probe.h>

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>
#include <thread>

namespace apex::distributed {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

class Socket {
 public:
  explicit Socket(const addrinfo& address)
      : descriptor_(socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC,
                           address.ai_protocol)) {}
  ~Socket() {
    if (descriptor_ >= 0) {
      close(descriptor_);
    }
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

// Returns 0 once connected, else an errno.
int try_connect(const addrinfo& address, milliseconds limit) {
  const Socket socket(address);
  if (socket.descriptor() < 0) {
    return errno;
  }
  if (connect(socket.descriptor(), address.ai_addr, address.ai_addrlen) == 0) {
    return 0;
  }
  if (errno != EINPROGRESS) {
    return errno;
  }
  pollfd waiting{socket.descriptor(), POLLOUT, 0};
  const int ready = poll(&waiting, 1, static_cast<int>(limit.count()));
  if (ready <= 0) {
    return ready == 0 ? ETIMEDOUT : errno;
  }
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

std::string describe(int error) {
  const std::string text = std::generic_category().message(error);
  if (error == ECONNREFUSED) {
    return "nothing listens there (" + text + ")";
  }
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
    return "the host does not answer (" + text + ")";
  }
  return "the connection failed (" + text + ")";
}

}  // namespace

std::string wait_for_listener(const std::string& host, int port, milliseconds timeout) {
  constexpr milliseconds kPerAddress{2000};
  constexpr milliseconds kLongestPause{1000};
  const auto end = Clock::now() + timeout;
  const auto left = [&] {
    return std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(end - Clock::now()));
  };
  milliseconds pause{20};
  while (true) {
    std::string reason;
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (status != 0) {
      reason = std::string("the host name is unknown (") + gai_strerror(status) + ")";
    } else {
      const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
      for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
        const int error = try_connect(*address, std::min(kPerAddress, left()));
        if (error == 0) {
          return "";
        }
        reason = describe(error);
      }
    }
    // Rank 0, or its DNS name, may appear later than this process.
    if (left() <= pause) {
      return reason;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

}  // namespace apex::distributed
