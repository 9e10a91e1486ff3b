# SPDX-License-Identifier: BSD-3-Clause
# Compiles every public header alone, without code generation. Run with cmake -P; needs INCLUDE,
# SOURCES, CXX, STANDARD, TORCH and BINARY. Left out are the umbrella, which programs of other tests
# include, and headers that the source of the same name includes before anything else: building the
# library without precompiled headers (preset `includes`) is the test of these.
file(GLOB_RECURSE headers RELATIVE ${INCLUDE} ${INCLUDE}/apex/*.h)
list(REMOVE_ITEM headers apex/parallel.h)
list(LENGTH headers count)
if(count LESS 10)
  message(FATAL_ERROR "only ${count} headers under ${INCLUDE}: is that the right folder?")
endif()
file(MAKE_DIRECTORY ${BINARY})
set(compiled 0)
foreach(header IN LISTS headers)
  string(REGEX REPLACE "^apex/(.*)\\.h$" "${SOURCES}/\\1.cpp" source ${header})
  set(first "")
  if(EXISTS ${source})
    file(STRINGS ${source} first REGEX "^#include" LIMIT_COUNT 1)
  endif()
  if(first STREQUAL "#include <${header}>")
    continue()
  endif()
  math(EXPR compiled "${compiled} + 1")
  file(WRITE ${BINARY}/header.cpp "#include <${header}>\n")
  execute_process(
    COMMAND ${CXX} -std=c++${STANDARD} -fsyntax-only -Wall -Wextra -Wno-unused-parameter -Werror
      -I${INCLUDE} -isystem ${TORCH}/include -isystem ${TORCH}/include/torch/csrc/api/include
      ${BINARY}/header.cpp
    ERROR_VARIABLE errors RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(SEND_ERROR "${header} does not compile alone:\n${errors}")
  endif()
endforeach()
message("${count} headers, ${compiled} of them compiled here")
