// SPDX-License-Identifier: BSD-3-Clause
#include <apex/error.h>

namespace apex {

// Constructors and destructors are out of line, so that each class has one vtable and one type_info
// and can be caught across shared libraries.
Error::Error(const std::string& message) : std::runtime_error(message) {}
Error::~Error() = default;

InvalidArgument::InvalidArgument(const std::string& message) : Error(message) {}
InvalidArgument::~InvalidArgument() = default;

RankMismatch::RankMismatch(const std::string& message) : Error(message) {}
RankMismatch::~RankMismatch() = default;

CommunicationError::CommunicationError(const std::string& message) : Error(message) {}
CommunicationError::~CommunicationError() = default;

NonFiniteGradient::NonFiniteGradient(const std::string& message) : Error(message) {}
NonFiniteGradient::~NonFiniteGradient() = default;

}  // namespace apex
