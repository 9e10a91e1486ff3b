# SPDX-License-Identifier: BSD-3-Clause
find_program(APEX_CLANG NAMES clang++ clang++-22 clang++-21 clang++-20 clang++-19 REQUIRED)
set(CMAKE_CXX_COMPILER ${APEX_CLANG})
