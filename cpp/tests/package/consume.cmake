# SPDX-License-Identifier: BSD-3-Clause
# Configures, builds and runs a consumer project from nothing. Run with cmake -P; needs
#   SOURCE, BINARY   its folders; BINARY is emptied first
#   GENERATOR        of the consumer
#   OPTIONS          further arguments of cmake, separated by |
#   TARGETS          what to build, separated by | (default: everything)
#   PROGRAM          what to run, relative to BINARY; none: nothing is run
#   EXPECT           a regular expression that the program's output must match

cmake_minimum_required(VERSION 3.22)
string(REPLACE "|" ";" options "${OPTIONS}")
string(REPLACE "|" ";" targets "${TARGETS}")

file(REMOVE_RECURSE "${BINARY}")
# CTest and scikit-build-core set environment variables that a user's shell does not have.
foreach(name IN ITEMS LD_LIBRARY_PATH LIBRARY_PATH CPATH CXXFLAGS LDFLAGS Libtorch_ROOT Torch_ROOT)
  unset(ENV{${name}})
endforeach()

function(run what)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${what} failed (${status}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

run(configure ${CMAKE_COMMAND} -S ${SOURCE} -B ${BINARY} -G ${GENERATOR} ${options})
message("${output}")
if(targets)
  list(PREPEND targets --target)
endif()
run(build ${CMAKE_COMMAND} --build ${BINARY} ${targets})
if(PROGRAM)
  run(program ${BINARY}/${PROGRAM})
  message("${output}")
  if(NOT output MATCHES "${EXPECT}")
    message(FATAL_ERROR "expected '${EXPECT}' in:\n${output}")
  endif()
endif()
