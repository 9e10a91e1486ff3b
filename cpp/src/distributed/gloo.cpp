// SPDX-License-Identifier: BSD-3-Clause
// Libtorch exports its Gloo backend, but plain wheels ship none of Gloo's headers. Where they are
// missing, gloo_standin/ declares the few names that ProcessGroupGloo.hpp mentions. Objects of
// those types are made, used and destroyed inside libtorch alone; here they are only behind
// pointers, and no symbol of theirs may be emitted by this file.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>

#include <distributed/backends.h>

#include <csignal>

namespace apex::distributed {

namespace {

/// Gloo writes to sockets whose other end may be gone, for which the system ends the process by
/// SIGPIPE, without a word. Python ignores that signal; so does this, unless the program has chosen
/// what is to happen.
void ignore_broken_pipes() {
  struct sigaction now{};
  if (sigaction(SIGPIPE, nullptr, &now) != 0) return;
  const bool chosen = (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL;
  if (!chosen) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request) {
  ignore_broken_pipes();
  // Heeds GLOO_SOCKET_IFNAME, else binds to the address of this machine's host name.
  auto options = c10d::ProcessGroupGloo::Options::create_default(request.timeout);
  options->group_name = request.group_name;
  options->global_ranks_in_group = request.global_ranks;
  return c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, request.rank, request.size,
                                                     std::move(options));
}

namespace {

// Plain casts: that of intrusive pointers leaks a reference (torch 2.13), and with it the threads
// of the group.

/// TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every backend.
c10d::Backend& unwrapped(c10d::Backend& backend) {
  auto* const wrapper = dynamic_cast<c10d::ProcessGroupWrapper*>(&backend);
  return wrapper ? *wrapper->getWrappedPg() : backend;
}

/// Of a backend for which the host waits; else null.
c10::intrusive_ptr<c10d::Backend::Options> options_of(c10d::Backend& given) {
  c10d::Backend& backend = unwrapped(given);
  const bool waits = dynamic_cast<HasGloo*>(&backend) != nullptr ||
                     dynamic_cast<c10d::ProcessGroupGloo*>(&backend) != nullptr;
  return waits ? backend.getBackendOptions() : nullptr;
}

}  // namespace

std::optional<std::chrono::milliseconds> gloo_timeout(c10d::Backend& backend) {
  const auto options = options_of(backend);
  if (!options) return std::nullopt;
  return options->timeout;
}

std::vector<uint64_t> gloo_global_ranks(c10d::Backend& backend) {
  const auto options = options_of(backend);
  return options ? options->global_ranks_in_group : std::vector<uint64_t>();
}

// Not by Backend::split(): it connects to the store anew, which takes a quarter of a second.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend_like(
    const c10::intrusive_ptr<c10d::Backend>& given, const c10::intrusive_ptr<c10d::Store>& store,
    int rank, int size) {
  auto* inner = &unwrapped(*given);
  if (auto* const outer = dynamic_cast<HasGloo*>(inner)) inner = outer->gloo().get();
  ignore_broken_pipes();
  return c10::make_intrusive<c10d::ProcessGroupGloo>(
      store, rank, size, dynamic_cast<c10d::ProcessGroupGloo&>(*inner).getOptions());
}

}  // namespace apex::distributed
