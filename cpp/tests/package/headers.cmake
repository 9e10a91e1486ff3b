# SPDX-License-Identifier: BSD-3-Clause
# Compiles every public header alone, without code generation. Run with cmake -P; needs INCLUDE,
# SOURCES, CXX, STANDARD, TORCH and BINARY. Leaves out the umbrella header, which programs of other
# tests include, and headers that the source of the same name includes first: a build of the library
# without precompiled headers (preset `includes`, and clang-tidy) tests these.
file(GLOB_RECURSE headers RELATIVE ${INCLUDE} ${INCLUDE}/apex/*.h)
list(REMOVE_ITEM headers apex/parallel.h)
list(LENGTH headers count)
if(count LESS 10)
  message(FATAL_ERROR "only ${count} headers under ${INCLUDE}: is that the right folder?")
endif()
file(MAKE_DIRECTORY ${BINARY})
file(GLOB_RECURSE sources ${SOURCES}/*.cpp)
foreach(source IN LISTS sources)
  file(STRINGS ${source} first REGEX "^#include" LIMIT_COUNT 1)
  get_filename_component(name ${source} NAME_WE)
  if(first MATCHES "^#include <(apex/(.*/)?${name}\\.h)>")
    list(REMOVE_ITEM headers ${CMAKE_MATCH_1})
  endif()
endforeach()
list(LENGTH headers compiled)

# Most of the time goes into parsing libtorch. So a header is compiled in front of another header
# that includes it, which does not change what the second one sees.
set(later ${headers})
foreach(header IN LISTS headers)
  foreach(user IN LISTS headers)
    file(STRINGS ${INCLUDE}/${user} included REGEX "^#include <${header}>" LIMIT_COUNT 1)
    if(included AND NOT before_${user})
      set(before_${user} "#include <${header}>\n")
      list(REMOVE_ITEM later ${header})
      break()
    endif()
  endforeach()
endforeach()
function(apex_lines header result)
  set(lines "#include <${header}>\n")
  if(before_${header})
    string(REGEX MATCH "apex/[^>]*" first "${before_${header}}")
    apex_lines(${first} more)
    string(PREPEND lines "${more}")
  endif()
  set(${result} "${lines}" PARENT_SCOPE)
endfunction()
foreach(header IN LISTS later)
  apex_lines(${header} lines)
  file(WRITE ${BINARY}/header.cpp "${lines}")
  execute_process(
    COMMAND ${CXX} -std=c++${STANDARD} -fsyntax-only -Wall -Wextra -Wno-unused-parameter -Werror
      -I${INCLUDE} -isystem ${TORCH}/include -isystem ${TORCH}/include/torch/csrc/api/include
      ${BINARY}/header.cpp
    ERROR_VARIABLE errors RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(SEND_ERROR "These lines do not compile:\n${lines}${errors}")
  endif()
endforeach()
message("${count} headers, ${compiled} of them compiled here")
