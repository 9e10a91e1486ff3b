# SPDX-License-Identifier: BSD-3-Clause
# Builds and runs SOURCE with the flags that pkg-config reports for the package in PREFIX. Run with
# cmake -P; needs PKG_CONFIG, CXX, PREFIX, SOURCE, BINARY and EXPECT. PKG_CONFIG_OPTION is an
# additional option of pkg-config.
file(GLOB_RECURSE pc "${PREFIX}/*/apex.pc")
get_filename_component(folder "${pc}" DIRECTORY)
set(ENV{PKG_CONFIG_PATH} "${folder}")
unset(ENV{LD_LIBRARY_PATH})
foreach(query IN ITEMS cflags libs variable=cxx_standard)
  execute_process(COMMAND ${PKG_CONFIG} ${PKG_CONFIG_OPTION} --${query} apex
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE ".*=" "" query ${query})
  separate_arguments(${query} UNIX_COMMAND "${answer}")
endforeach()
file(REMOVE_RECURSE "${BINARY}")
file(MAKE_DIRECTORY "${BINARY}")
execute_process(
  COMMAND ${CXX} -std=c++${cxx_standard} ${cflags} ${SOURCE}
    -o ${BINARY}/program ${libs}
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${BINARY}/program OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
message("${output}")
if(NOT output MATCHES "${EXPECT}")
  message(FATAL_ERROR "expected '${EXPECT}' in: ${output}")
endif()
