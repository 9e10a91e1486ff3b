# SPDX-License-Identifier: BSD-3-Clause
# Configures a tree for the static library and takes its archive from ARCHIVE instead of compiling
# it. Installs from there; a consumer, a program that trains and pkg-config then use it. The consumer
# must contain the operators, which only static initializers refer to, and must not need a shared
# apex. Run with cmake -P; needs SOURCE, CONSUME, BINARY, GENERATOR, MAKE_PROGRAM, CXX, ARCHIVE,
# TORCH, CUDA, READELF and PKG_CONFIG (may be empty).
set(tree ${BINARY}/tree)
set(prefix ${BINARY}/prefix)
file(REMOVE_RECURSE "${BINARY}")

function(run)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}: ${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} -S ${SOURCE} -B ${tree} -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}
  -DCMAKE_CXX_COMPILER=${CXX} -DBUILD_SHARED_LIBS=OFF -DAPEX_BUILD_TESTS=OFF
  -DAPEX_BUILD_EXAMPLES=OFF -DAPEX_CUDA=${CUDA} -DLibtorch_ROOT=${TORCH})
if(NOT output MATCHES "static library")
  message(FATAL_ERROR "BUILD_SHARED_LIBS=OFF does not give a static library: ${output}")
endif()
file(COPY_FILE "${ARCHIVE}" "${tree}/cpp/libapex_parallel.a")
run(${CMAKE_COMMAND} --install ${tree} --prefix ${prefix} --component apex_cpp)
if(NOT EXISTS ${prefix}/share/doc/apex/LICENSE)
  message(FATAL_ERROR "the license is not installed")
endif()

foreach(where IN ITEMS "apex_DIR=${tree}" "apex_ROOT=${prefix}")
  run(${CMAKE_COMMAND} -DSOURCE=${SOURCE}/cpp/tests/package/consumer -DBINARY=${BINARY}/consumer
    -DGENERATOR=${GENERATOR} -DPROGRAM=consumer -DEXPECT=refused,\ operators\ registered
    "-DOPTIONS=-D${where}|-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}|-DCMAKE_CXX_COMPILER=${CXX}|-DCONSUMER_OPERATORS=ON"
    -P ${CONSUME})
  message("${output}")
  run(${READELF} -d ${BINARY}/consumer/consumer)
  if(output MATCHES "libapex")
    message(FATAL_ERROR "the program needs a shared apex: ${output}")
  endif()
endforeach()

# Two ranks train with a program in C. Of the ports below the ephemeral ones, few are ever in use.
run(${CMAKE_COMMAND} -DSOURCE=${SOURCE}/cpp/examples/c -DBINARY=${BINARY}/c -DGENERATOR=${GENERATOR}
  "-DOPTIONS=-Dapex_ROOT=${prefix}|-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}|-DCMAKE_CXX_COMPILER=${CXX}"
  -P ${CONSUME})
string(RANDOM LENGTH 4 ALPHABET 0123456789 port)
foreach(rank IN ITEMS 0 1)
  set(rank${rank} ${CMAKE_COMMAND} -E env RANK=${rank} WORLD_SIZE=2 LOCAL_RANK=${rank} MASTER_ADDR=127.0.0.1
    MASTER_PORT=2${port} OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo ${BINARY}/c/c_digits ${BINARY}/c/digits.bin)
endforeach()
execute_process(COMMAND ${rank1} COMMAND ${rank0}
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULTS_VARIABLE status)
if(NOT status STREQUAL "0;0" OR NOT output MATCHES "epoch 10: loss 0\\.1[0-9]+, test accuracy 9")
  message(FATAL_ERROR "two ranks with a static apex did not train (${status}):\n${output}")
endif()

if(PKG_CONFIG)
  run(${CMAKE_COMMAND} -DPKG_CONFIG=${PKG_CONFIG} -DCXX=${CXX} -DPREFIX=${prefix}
    -DSOURCE=${SOURCE}/cpp/tests/package/consumer/main.cpp -DBINARY=${BINARY}/pkg_config
    -DEXPECT=refused -P ${SOURCE}/cpp/tests/package/pkg_config.cmake)
endif()
