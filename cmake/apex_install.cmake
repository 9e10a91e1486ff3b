# SPDX-License-Identifier: BSD-3-Clause
# Install rules, the CMake package and the build-tree export. In a wheel the prefix is the package
# folder, apex/, next to torch/ in site-packages. Everything is in the install component apex_cpp,
# so that the C++ package can also be installed alone from a build for Python.
include(CMakePackageConfigHelpers)

set(apex_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/apex")

# The torch of the build, for an installed package without a torch next to it. Not set in a wheel,
# which is for other machines, and whose build environment may be deleted after the build.
set(apex_torch_hint "${Libtorch_PREFIX}")
if(DEFINED SKBUILD)
  set(apex_torch_hint "")
endif()

# Programs that link the library find torch without environment variables.
set(apex_rpath "$ORIGIN")
if(DEFINED SKBUILD)
  list(APPEND apex_rpath "$ORIGIN/../../torch/lib")
  # Wheels contain no symbolic links, so a versioned library would be in the wheel three times.
  set_property(TARGET apex_parallel PROPERTY VERSION)
  set_property(TARGET apex_parallel PROPERTY SOVERSION)
endif()
if(apex_torch_hint)
  list(APPEND apex_rpath "${apex_torch_hint}/lib")
endif()
set_target_properties(apex_parallel PROPERTIES INSTALL_RPATH "${apex_rpath}")

set(apex_installed apex_parallel)
if(NOT APEX_BUILD_SHARED)
  list(APPEND apex_installed apex_parallel_whole)
endif()
install(TARGETS ${apex_installed} EXPORT apexTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT apex_cpp NAMELINK_COMPONENT apex_cpp
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT apex_cpp
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT apex_cpp)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/cpp/include/apex
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT apex_cpp)
install(EXPORT apexTargets NAMESPACE apex::
  DESTINATION ${apex_cmake_dir} COMPONENT apex_cpp)
if(NOT DEFINED SKBUILD)  # a wheel has it in its metadata
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE
    DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/apex COMPONENT apex_cpp)
endif()

# The requirements of a static library on its consumers: a linker feature that CMake supports since
# 3.24 and, with CUDA parts, the CUDA runtime, but not nvcc.
set(apex_config_before "")
set(apex_config_after "")
if(NOT APEX_BUILD_SHARED)
  set(apex_config_before "
if(CMAKE_VERSION VERSION_LESS 3.24)
  set(apex_FOUND FALSE)
  set(apex_NOT_FOUND_MESSAGE \"a static apex needs CMake 3.24 or newer\")
  return()
endif()
")
  if(APEX_WITH_CUDA)
    string(APPEND apex_config_before "find_dependency(CUDAToolkit)\n")
    set(apex_config_after "
get_target_property(_apex_configurations apex::archive IMPORTED_CONFIGURATIONS)
foreach(_apex_configuration IN LISTS _apex_configurations)
  set_target_properties(apex::archive PROPERTIES
    IMPORTED_LINK_INTERFACE_LANGUAGES_\${_apex_configuration} CXX)
endforeach()
unset(_apex_configurations)
unset(_apex_configuration)
")
  endif()
endif()

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/apexConfig.cmake.in ${PROJECT_BINARY_DIR}/apexConfig.cmake
  INSTALL_DESTINATION ${apex_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/apexConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/apexConfig.cmake
  ${PROJECT_BINARY_DIR}/apexConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake
  DESTINATION ${apex_cmake_dir} COMPONENT apex_cpp)

# The build tree as a package: -Dapex_DIR=<build folder>.
export(EXPORT apexTargets NAMESPACE apex:: FILE ${PROJECT_BINARY_DIR}/apexTargets.cmake)
configure_file(${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake
  ${PROJECT_BINARY_DIR}/FindLibtorch.cmake COPYONLY)

# For builds without CMake: pkg-config --cflags --libs apex. Relocatable, like the CMake package.
set(apex_pc_directory "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
file(RELATIVE_PATH apex_pc_up "/prefix/${apex_pc_directory}" "/prefix")
string(REGEX REPLACE "/$" "" apex_pc_up "${apex_pc_up}")
set(apex_pc_prefix "\${pcfiledir}/${apex_pc_up}")
# GNUInstallDirs allows absolute folders. The package is not relocatable then.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(apex_pc_prefix "${CMAKE_INSTALL_PREFIX}")
endif()
foreach(apex_pc_folder IN ITEMS LIBDIR INCLUDEDIR)
  set(apex_pc_${apex_pc_folder} "\${prefix}/${CMAKE_INSTALL_${apex_pc_folder}}")
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${apex_pc_folder}}")
    set(apex_pc_${apex_pc_folder} "${CMAKE_INSTALL_${apex_pc_folder}}")
  endif()
endforeach()
if(DEFINED SKBUILD)
  set(apex_pc_torch "\${prefix}/../torch")
else()
  set(apex_pc_torch "${Libtorch_PREFIX}")
endif()
set(apex_pc_torch_libraries "-ltorch_cpu -lc10")
if(APEX_WITH_CUDA)
  string(PREPEND apex_pc_torch_libraries "-ltorch_cuda -lc10_cuda ")
endif()
if(APEX_BUILD_SHARED)
  set(apex_pc_defines "")
  set(apex_pc_library "-L\${libdir} -lapex_parallel -Wl,-rpath,\${libdir}")
  # Programs must link these directly: see apexConfig.cmake.in.
  set(apex_pc_torch_libraries
    "-Wl,--push-state,--no-as-needed ${apex_pc_torch_libraries} -Wl,--pop-state")
else()
  set(apex_pc_defines " -DAPEX_STATIC_DEFINE")
  set(apex_pc_library "-Wl,--whole-archive,\${libdir}/libapex_parallel.a,--no-whole-archive")
  if(APEX_WITH_CUDA)
    list(GET CUDAToolkit_LIBRARY_DIR 0 apex_cudart_folder)
    string(APPEND apex_pc_torch_libraries " -L${apex_cudart_folder} -lcudart_static -lrt -ldl -lpthread")
  endif()
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/apex.pc.in ${PROJECT_BINARY_DIR}/apex.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/apex.pc
  DESTINATION ${apex_pc_directory} COMPONENT apex_cpp)
