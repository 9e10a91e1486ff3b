# SPDX-License-Identifier: BSD-3-Clause
# Installs the C++ package of a build tree and moves it to PREFIX. Run with cmake -P; needs BUILD,
# CONFIG, PREFIX and TORCH. A package in a wheel looks for torch only beside its own folder, so a
# link to torch is put there.
file(REMOVE_RECURSE "${PREFIX}.staging" "${PREFIX}")
execute_process(
  COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${PREFIX}.staging --component apex_cpp
    --config ${CONFIG}
  COMMAND_ERROR_IS_FATAL ANY)
file(RENAME "${PREFIX}.staging" "${PREFIX}")
get_filename_component(site "${PREFIX}" DIRECTORY)
file(CREATE_LINK "${TORCH}" "${site}/torch" SYMBOLIC)
