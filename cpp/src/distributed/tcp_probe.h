// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <string>

namespace apex::distributed {

/// Blocks until something accepts TCP connections at host:port, for at most `timeout`. Returns ""
/// when it does, else why the last attempt failed, as the end of a sentence: "the host name is
/// unknown (...)", "nothing listens there (Connection refused)".
///
/// libtorch's store, left alone with an address that nobody listens at, tries for twice its timeout
/// and fills the terminal with stack traces; so the address is tried out before it is given to the
/// store.
std::string wait_for_listener(const std::string& host, int port, std::chrono::milliseconds timeout);

}  // namespace apex::distributed
