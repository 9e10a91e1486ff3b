// SPDX-License-Identifier: BSD-3-Clause
// libtorch exports its Gloo backend, but plain wheels do not ship Gloo's headers. If they are
// missing, gloo_standin/ declares the few names that ProcessGroupGloo.hpp mentions. Only libtorch
// creates, uses and destroys objects of these types. This file handles pointers to them, and must
// not emit any of their symbols.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>

#include <distributed/backends.h>

#include <csignal>

namespace apex::distributed {

namespace {

/// Gloo may write to a socket whose peer has exited, and the system then kills this process
/// silently with SIGPIPE. Python ignores that signal, and so does this function, unless the program
/// has set an action for it.
void ignore_broken_pipes() {
  struct sigaction now{};
  if (sigaction(SIGPIPE, nullptr, &now) != 0) return;
  const bool chosen = (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL;
  if (!chosen) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request) {
  ignore_broken_pipes();
  // Uses GLOO_SOCKET_IFNAME if set, else the address of this host's name.
  auto options = c10d::ProcessGroupGloo::Options::create_default(request.timeout);
  options->group_name = request.group_name;
  options->global_ranks_in_group = request.global_ranks;
  return c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, request.rank, request.size,
                                                     std::move(options));
}

c10d::Backend& unwrapped(c10d::Backend& backend) {
  auto* const wrapper = dynamic_cast<c10d::ProcessGroupWrapper*>(&backend);
  return wrapper ? *wrapper->getWrappedPg() : backend;
}

c10::intrusive_ptr<c10d::Backend::Options> gloo_options(c10d::Backend& given) {
  c10d::Backend& backend = unwrapped(given);
  const std::string name = backend.getBackendName();
  return name == "gloo" || name == "apex" ? backend.getBackendOptions() : nullptr;
}

// Does not use Backend::split(), which reconnects to the store and takes a quarter of a second.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend_like(
    c10d::Backend& given, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  ignore_broken_pipes();
  // A plain cast: intrusive_ptr's cast leaks a reference (torch 2.13), and with it the threads of
  // the group.
  auto& gloo = dynamic_cast<c10d::ProcessGroupGloo&>(unwrapped(given));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, gloo.getOptions());
}

}  // namespace apex::distributed
