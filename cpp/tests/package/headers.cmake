# SPDX-License-Identifier: BSD-3-Clause
# Compiles every public header alone, without code generation. Run with cmake -P; needs INCLUDE,
# SOURCES, CXX, STANDARD, TORCH and BINARY. Leaves out the umbrella header, which programs of other
# tests include, and headers that the source of the same name includes first: a build of the library
# without precompiled headers (preset `includes`, and clang-tidy) tests these.
file(GLOB_RECURSE headers RELATIVE ${INCLUDE} ${INCLUDE}/apex/*.h)
list(REMOVE_ITEM headers apex/parallel.h)
file(GLOB_RECURSE sources ${SOURCES}/*.cpp)
foreach(source IN LISTS sources)
  file(STRINGS ${source} first REGEX "^#include" LIMIT_COUNT 1)
  get_filename_component(name ${source} NAME_WE)
  if(first MATCHES "^#include <(apex/(.*/)?${name}\\.h)>")
    list(REMOVE_ITEM headers ${CMAKE_MATCH_1})
  endif()
endforeach()
if(NOT headers)
  message(FATAL_ERROR "there is no header under ${INCLUDE}: is that the right folder?")
endif()
foreach(header IN LISTS headers)
  file(WRITE ${BINARY}/header.cpp "#include <${header}>\n")
  execute_process(
    COMMAND ${CXX} -std=c++${STANDARD} -fsyntax-only -Wall -Wextra -Wno-unused-parameter -Werror
      -I${INCLUDE} -isystem ${TORCH}/include -isystem ${TORCH}/include/torch/csrc/api/include
      ${BINARY}/header.cpp
    ERROR_VARIABLE errors RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(SEND_ERROR "#include <${header}> does not compile:\n${errors}")
  endif()
endforeach()
