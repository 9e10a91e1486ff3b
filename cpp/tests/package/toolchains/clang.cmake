# SPDX-License-Identifier: BSD-3-Clause
set(CMAKE_CXX_COMPILER clang++)
