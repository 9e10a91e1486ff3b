// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
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

/// The part of a collective's name that is the same on all ranks: without the backward number,
/// because ranks may count differently, and the list of buffers, because the broadcast itself
/// reports its differences.
inline std::string in_common(const std::string& what) {
  return what.substr(0, std::min(what.find(", of backward number"), what.find(" ('")));
}

}  // namespace apex::parallel
