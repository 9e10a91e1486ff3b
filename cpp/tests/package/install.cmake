# SPDX-License-Identifier: BSD-3-Clause
# Installs the C++ package of a build tree to STAGING and moves it to PREFIX. Run with cmake -P;
# needs BUILD, CONFIG, STAGING, PREFIX and TORCH. A package in a wheel looks for torch only beside
# its own folder, so a link to torch is put there.
file(REMOVE_RECURSE "${STAGING}" "${PREFIX}")
execute_process(
  COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${STAGING} --component apex_cpp
    --config ${CONFIG}
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "the installation failed: ${output}")
endif()
file(RENAME "${STAGING}" "${PREFIX}")
get_filename_component(site "${PREFIX}" DIRECTORY)
file(CREATE_LINK "${TORCH}" "${site}/torch" SYMBOLIC)

file(GLOB_RECURSE files RELATIVE "${PREFIX}" "${PREFIX}/*")
foreach(wanted IN ITEMS
    include/apex/parallel.h cmake/apex/apexConfig.cmake cmake/apex/apexConfigVersion.cmake
    cmake/apex/apexTargets.cmake cmake/apex/FindLibtorch.cmake)
  if(NOT files MATCHES "(^|[;/])${wanted}")
    message(SEND_ERROR "${wanted} was not installed, only ${files}")
  endif()
endforeach()
# No installed file may contain the path of the first installation.
foreach(file IN LISTS files)
  if(file MATCHES "\\.cmake$")
    file(READ "${PREFIX}/${file}" text)
    string(FIND "${text}" "${STAGING}" position)
    if(NOT position EQUAL -1)
      message(SEND_ERROR "${file} names the prefix it was installed to")
    endif()
  endif()
endforeach()
