# SPDX-License-Identifier: BSD-3-Clause
# The requirements of a static apex::parallel on programs that link it. Included if
# APEX_BUILD_SHARED is off.
if(CMAKE_VERSION VERSION_LESS 3.24)
  message(FATAL_ERROR
    "A static apex needs CMake 3.24 or newer (this is ${CMAKE_VERSION}): upgrade it, or build the "
    "shared library (APEX_BUILD_SHARED=ON).")
endif()

# Declarations have no visibility attributes, both in the library and in its consumers.
target_compile_definitions(apex_parallel PUBLIC APEX_STATIC_DEFINE)
# It may be linked into a shared library, for example our Python module.
set_target_properties(apex_parallel PROPERTIES
  POSITION_INDEPENDENT_CODE ON
  EXPORT_NAME archive)

# Operators register themselves in static initializers, in object files to which no symbol of a
# program may refer. So the linker must take the whole archive. Consumers link this wrapper.
#
# The archive must follow the program's own objects. If several objects define an inline function,
# the linker takes the first definition, and the last objects of the archive are compiled for newer
# processors (src/kernels/CMakeLists.txt).
add_library(apex_parallel_whole INTERFACE)
target_link_libraries(apex_parallel_whole INTERFACE $<LINK_LIBRARY:WHOLE_ARCHIVE,$<TARGET_NAME:apex_parallel>>)
set_target_properties(apex_parallel_whole PROPERTIES EXPORT_NAME parallel)
add_library(apex::parallel ALIAS apex_parallel_whole)
