// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

#include "plain_text.h"

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

/// Shortened, because every rank reads it. A traceback has the message at its end, other texts at
/// their beginning.
inline std::string shortened(const std::string& text) {
  constexpr size_t kBegin = 150, kEnd = 450;
  if (text.size() <= kBegin + kEnd) return text;
  return text.substr(0, character_before(text, kBegin)) + " ... " +
         text.substr(character_before(text, text.size() - kEnd));
}

inline std::string first_line_of(const std::exception_ptr& cause) {
  const std::string text = message_of(cause);
  return text.substr(0, text.find('\n'));
}

}  // namespace apex::parallel
