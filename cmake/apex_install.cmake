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

install(TARGETS apex_parallel EXPORT apexTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT apex_cpp NAMELINK_COMPONENT apex_cpp)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/cpp/include/apex
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT apex_cpp)
install(EXPORT apexTargets NAMESPACE apex::
  DESTINATION ${apex_cmake_dir} COMPONENT apex_cpp)
if(NOT DEFINED SKBUILD)  # a wheel has it in its metadata
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE
    DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/apex COMPONENT apex_cpp)
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
