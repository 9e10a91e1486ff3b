// SPDX-License-Identifier: BSD-3-Clause
#include <apex/error.h>

namespace apex {

// Destructors are out of line, so that each class has one vtable and one type_info and can be
// caught across shared libraries.
Error::Error(const std::string& message) : std::runtime_error(message) {}
Error::~Error() = default;

InvalidArgument::~InvalidArgument() = default;
RankMismatch::~RankMismatch() = default;
CommunicationError::~CommunicationError() = default;
NonFiniteGradient::~NonFiniteGradient() = default;
Interrupted::~Interrupted() = default;

}  // namespace apex
