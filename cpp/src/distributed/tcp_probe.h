// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <string>

namespace apex::distributed {

/// Blocks until host:port accepts TCP connections, for at most `timeout`. Returns "" on success,
/// else why the last attempt failed, as the end of a sentence: "the host name is unknown (...)",
/// "nothing listens there (Connection refused)".
///
/// libtorch's store retries an address without a listener for twice its timeout and prints many
/// stack traces, so the address is probed before the store uses it.
std::string wait_for_listener(const std::string& host, int port, std::chrono::milliseconds timeout);

}  // namespace apex::distributed
