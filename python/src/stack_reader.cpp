// SPDX-License-Identifier: BSD-3-Clause
#include "stack_reader.h"

#include <nanobind/stl/string.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <apex/parallel/stall_report.h>

namespace nb = nanobind;

namespace apex::python {

namespace {

/// Threads of this module that take the GIL. The interpreter kills a thread that takes the GIL
/// during shutdown. So shutdown waits for these threads, and no new ones are started. Never
/// destroyed.
struct Threads {
  std::mutex mutex;  ///< guards the rest; not held while a thread waits for the GIL
  std::condition_variable done;
  bool ended = false;
  int running = 0;
  int64_t pid = 0;  ///< of the process that started them, to detect a fork
};

Threads& threads() {
  static auto* const instance = new Threads;
  return *instance;
}

/// Runs `body` with the GIL on a new thread, because native code may hold the GIL for a long time.
/// False if the interpreter is shutting down. `body` must not throw.
bool start_under_lock(std::function<void()> body) {
  {
    const std::lock_guard<std::mutex> lock(threads().mutex);
    if (threads().ended) return false;
    if (threads().pid != ::getpid()) threads().running = 0;
    threads().pid = ::getpid();
    ++threads().running;
  }
  std::thread([body = std::move(body)]() mutable {
    {
      const nb::gil_scoped_acquire gil;
      body();
      body = nullptr;
    }
    const std::lock_guard<std::mutex> lock(threads().mutex);
    --threads().running;
    threads().done.notify_all();
  }).detach();
  return true;
}

void end_threads() {
  const nb::gil_scoped_release released;
  std::unique_lock<std::mutex> lock(threads().mutex);
  threads().ended = true;
  threads().done.wait(lock, [] { return threads().running == 0 || threads().pid != ::getpid(); });
}

constexpr size_t kInner = 9, kOuter = 4;
/// Timeout for the GIL. Python code releases it every few milliseconds, and the other ranks wait
/// for this answer.
constexpr std::chrono::milliseconds kPatience{300};
constexpr const char* kNoLock =
    "Python: the interpreter's lock is not released; native code is running, or has stopped";

/// The stack of the main thread: its innermost and outermost frames, without the frames in which
/// torch calls modules. Needs the GIL.
std::string format_stack() try {
  const nb::object frames = nb::module_::import_("sys").attr("_current_frames")();
  const nb::object main = nb::module_::import_("threading").attr("main_thread")().attr("ident");
  const nb::object all = nb::module_::import_("traceback").attr("format_stack")(frames[main]);
  std::vector<std::string> lines;
  for (std::string& line : nb::cast<std::vector<std::string>>(all)) {
    if (line.find("_call_impl") == std::string::npos) lines.push_back(std::move(line));
  }
  std::string text = "Python, the most recent call last:\n";
  for (size_t i = 0; i < lines.size(); ++i) {
    const bool shown = i < kOuter || i + kInner >= lines.size();
    if (shown) text += lines[i];
    if (!shown && i == kOuter) text += "  ...\n";
  }
  return text;
} catch (const std::exception& error) {
  return std::string("Python: its stack could not be read: ") + error.what();
}

std::string read_stack() {
  static std::atomic<bool> busy{false};  // a previous call still waits for the GIL
  if (busy.exchange(true)) return kNoLock;
  const auto promise = std::make_shared<std::promise<std::string>>();
  std::future<std::string> stack = promise->get_future();
  const bool started = start_under_lock([promise] {
    std::string text = format_stack();
    busy = false;
    promise->set_value(std::move(text));
  });
  if (!started) {
    busy = false;
    return {};
  }
  return stack.wait_for(kPatience) == std::future_status::ready ? stack.get() : kNoLock;
}

/// Sends a notice to Python's loggers, on another thread because handlers may be slow.
void log_notice(const std::string& text) {
  start_under_lock([text] {
    try {
      nb::module_::import_("apex.parallel._stalls").attr("log_notice")(text);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("apex: a handler of the logger 'apex.parallel.watch'");
    }
  });
}

}  // namespace

void init_stack_reader(nb::module_& m) {
  m.def("stall_report", &parallel::stall_report);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&end_threads));
  parallel::add_state_reader(&read_stack);
  parallel::on_notice(&log_notice);
}

}  // namespace apex::python
