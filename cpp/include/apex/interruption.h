// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

#include <apex/error.h>
#include <apex/export.h>

namespace apex {

/// A wait for other ranks was ended from this process. The process group cannot be used afterwards.
class APEX_API Interrupted : public Error {
 public:
  explicit Interrupted(const std::string& message);
  ~Interrupted() override;
};

/// Sets what whoever waits for other ranks over Gloo for more than a quarter of a second asks about
/// twenty times a second, on the thread that waits: whether to end the wait, by Interrupted. It may
/// throw instead; then the wait ends by that. For one that never does, an empty function. Python's
/// module sets one that lets the main thread see signals: what their handlers raise ends the wait
/// (KeyboardInterrupt for Ctrl-C). Thread safe; blocks nothing.
APEX_API void set_interruption_check(std::function<bool()> interrupted);

}  // namespace apex
