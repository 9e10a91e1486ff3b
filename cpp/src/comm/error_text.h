// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace apex::parallel {

/// The message of an exception, without torch's backtrace.
inline std::string message_of(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown error";
  }
}

inline std::string first_line_of(const std::exception_ptr& cause) {
  const std::string text = message_of(cause);
  return text.substr(0, text.find('\n'));
}

}  // namespace apex::parallel
