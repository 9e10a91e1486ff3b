// SPDX-License-Identifier: BSD-3-Clause
#include "stack_reader.h"

#include <nanobind/stl/string.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <mutex>
#include <string>
#include <thread>

#include <apex/parallel/stall_report.h>

namespace nb = nanobind;

namespace apex::python {

namespace {

/// A thread that asks for the interpreter's lock while the interpreter ends would be ended by it.
/// So the end waits for that thread, and none is started from then on. Never destroyed.
struct Reading {
  std::mutex mutex;  ///< guards the rest; not held while the interpreter's lock is asked for
  std::condition_variable done;
  bool ended = false;
  bool busy = false;
  int64_t pid = 0;  ///< of the process that is busy: not one that it has forked
};

Reading& reading() {
  static auto* const instance = new Reading;
  return *instance;
}

constexpr int kFrames = 8;
/// Python code lets go of the lock every few milliseconds; and the others wait for the answer.
constexpr std::chrono::milliseconds kPatience{300};
constexpr const char* kNoLock =
    "Python: the interpreter's lock is not released; native code is running, or has stopped";

/// Of the main thread, the innermost frames. Under the interpreter's lock.
std::string format_stack() try {
  const nb::object frames = nb::module_::import_("sys").attr("_current_frames")();
  const nb::object main = nb::module_::import_("threading").attr("main_thread")().attr("ident");
  const nb::object lines = nb::module_::import_("traceback")
                               .attr("format_stack")(frames[main], nb::arg("limit") = kFrames);
  return "Python, the most recent call last:\n" +
         nb::cast<std::string>(nb::str("").attr("join")(lines));
} catch (const std::exception& error) {
  return std::string("Python: its stack could not be read: ") + error.what();
}

std::string read_stack() {
  {
    const std::lock_guard<std::mutex> lock(reading().mutex);
    if (reading().ended) return {};
    if (reading().busy) return kNoLock;
    reading().busy = true;
    reading().pid = ::getpid();
  }
  std::promise<std::string> promise;
  std::future<std::string> stack = promise.get_future();
  std::thread([promise = std::move(promise)]() mutable {
    std::string text;
    {
      const nb::gil_scoped_acquire gil;
      text = format_stack();
    }
    const std::lock_guard<std::mutex> lock(reading().mutex);
    reading().busy = false;
    promise.set_value(std::move(text));
    reading().done.notify_all();
  }).detach();
  return stack.wait_for(kPatience) == std::future_status::ready ? stack.get() : kNoLock;
}

void end_reading() {
  const nb::gil_scoped_release released;
  std::unique_lock<std::mutex> lock(reading().mutex);
  reading().ended = true;
  reading().done.wait(lock, [] { return !reading().busy || reading().pid != ::getpid(); });
}

}  // namespace

void init_stack_reader(nb::module_& m) {
  m.def("stall_report", &parallel::stall_report);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&end_reading));
  parallel::add_state_reader(&read_stack);
}

}  // namespace apex::python
