# SPDX-License-Identifier: BSD-3-Clause
# What a static apex::parallel asks of the programs that link it. Included when APEX_BUILD_SHARED is off.
if(CMAKE_VERSION VERSION_LESS 3.24)
  message(FATAL_ERROR
    "A static apex needs CMake 3.24 or newer (this is ${CMAKE_VERSION}): upgrade it, or build the "
    "shared library (APEX_BUILD_SHARED=ON).")
endif()

# Declarations without visibility attributes, in the library and in its consumers alike.
target_compile_definitions(apex_parallel PUBLIC APEX_STATIC_DEFINE)
# It may be linked into somebody's shared library, our Python module for one.
set_target_properties(apex_parallel PROPERTIES
  POSITION_INDEPENDENT_CODE ON
  EXPORT_NAME archive)

# Operators register themselves in static initializers, in object files that no symbol of a program
# may refer to: the linker has to take the whole archive. What consumers link is this wrapper.
#
# The archive stays among the libraries, after the program's own objects: of an inline function that
# several objects hold the linker takes the first, and the last objects of the archive are compiled
# for newer processors (src/kernels/CMakeLists.txt).
add_library(apex_parallel_whole INTERFACE)
target_link_libraries(apex_parallel_whole INTERFACE $<LINK_LIBRARY:WHOLE_ARCHIVE,$<TARGET_NAME:apex_parallel>>)
set_target_properties(apex_parallel_whole PROPERTIES EXPORT_NAME parallel)
add_library(apex::parallel ALIAS apex_parallel_whole)
