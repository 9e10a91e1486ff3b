# SPDX-License-Identifier: BSD-3-Clause
# Finds clang in the same way as CMakeLists.txt of the folder above.
foreach(version RANGE 22 16 -1)
  list(APPEND apex_clang_names clang++-${version})
endforeach()
find_program(APEX_CLANG NAMES ${apex_clang_names} REQUIRED)
set(CMAKE_CXX_COMPILER ${APEX_CLANG})
