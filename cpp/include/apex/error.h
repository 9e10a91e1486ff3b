// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include <apex/export.h>

/// Exceptions of this library. A message says what happened, the rank and the parameter where
/// known, the likely cause, and the remedy. Python receives the built-in exception named here.

namespace apex {

/// Base of all errors below (Python: RuntimeError). The state of the object that threw is still
/// valid unless its documentation says otherwise.
class APEX_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
  ~Error() override;
};

/// An argument or a combination of options that cannot be honoured (Python: ValueError). Thrown
/// before anything is changed or sent.
class APEX_API InvalidArgument : public Error {
 public:
  using Error::Error;
  ~InvalidArgument() override;
};

/// The ranks of a process group do not agree on what they are about to do (Python: RuntimeError).
/// Thrown on every participating rank, so that no rank keeps waiting.
class APEX_API RankMismatch : public Error {
 public:
  using Error::Error;
  ~RankMismatch() override;
};

/// A collective failed or timed out (Python: RuntimeError). The process group is usually unusable
/// afterwards; create a new one.
class APEX_API CommunicationError : public Error {
 public:
  using Error::Error;
  ~CommunicationError() override;
};

/// With ReducerOptions::check_finite: a rank contributed an infinite or NaN gradient (Python:
/// RuntimeError). Thrown on every rank, after the gradients were reduced.
class APEX_API NonFiniteGradient : public Error {
 public:
  using Error::Error;
  ~NonFiniteGradient() override;
};

/// This process ended a wait for other ranks. The process group cannot be used afterwards.
class APEX_API Interrupted : public Error {
 public:
  using Error::Error;
  ~Interrupted() override;
};

/// Sets a function that can end a wait for other ranks over Gloo. From a quarter of a second on,
/// the waiting thread calls it about twenty times a second. If it returns true, the wait throws
/// Interrupted; if it throws, the wait throws that exception. An empty function removes it. In
/// Python it runs signal handlers, so that Ctrl-C ends a wait. Thread safe; does not block.
APEX_API void set_interruption_check(std::function<bool()> interrupted);

}  // namespace apex
