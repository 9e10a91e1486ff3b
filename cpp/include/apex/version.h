// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The version of this package. CMake, the Python distribution and `apex.__version__` read it from
/// this file.

#define APEX_VERSION_MAJOR 0
#define APEX_VERSION_MINOR 1
#define APEX_VERSION_PATCH 0

#define APEX_VERSION_STRING_(x) #x
#define APEX_VERSION_STRING(x) APEX_VERSION_STRING_(x)
#define APEX_VERSION                      \
  APEX_VERSION_STRING(APEX_VERSION_MAJOR) \
  "." APEX_VERSION_STRING(APEX_VERSION_MINOR) "." APEX_VERSION_STRING(APEX_VERSION_PATCH)
