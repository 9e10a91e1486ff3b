// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

#include <apex/error.h>
#include <apex/export.h>

namespace apex {

/// This process ended a wait for other ranks. The process group cannot be used afterwards.
class APEX_API Interrupted : public Error {
 public:
  explicit Interrupted(const std::string& message);
  ~Interrupted() override;
};

/// Sets a function that can end a wait for other ranks over Gloo. After a quarter of a second of
/// waiting, the waiting thread calls it about twenty times a second. If it returns true, the wait
/// throws Interrupted; if it throws, the wait throws that exception. An empty function removes it.
/// In Python it runs pending signal handlers, if called on the main thread. An exception from a
/// handler (KeyboardInterrupt for Ctrl-C) ends the wait. Thread safe; does not block.
APEX_API void set_interruption_check(std::function<bool()> interrupted);

}  // namespace apex
