# SPDX-License-Identifier: BSD-3-Clause
# Fails if anything under cpp/ includes Python or a binding library, or if the built library links or
# uses one. Run with cmake -P; needs SOURCE_DIR, LIBRARY, READELF and NM.

file(GLOB_RECURSE sources
  ${SOURCE_DIR}/*.h ${SOURCE_DIR}/*.hpp ${SOURCE_DIR}/*.cpp ${SOURCE_DIR}/*.cu ${SOURCE_DIR}/*.cuh)
list(LENGTH sources count)
if(count LESS 10)
  message(FATAL_ERROR "only ${count} sources under ${SOURCE_DIR}: is that the right folder?")
endif()
foreach(source IN LISTS sources)
  file(STRINGS ${source} lines REGEX
    "#[ \t]*include[ \t]*[<\"](Python\\.h|pybind11/|nanobind/|torch/extension\\.h|torch/python\\.h|torch/csrc/[a-z_/]*python_)")
  foreach(line IN LISTS lines)
    message(SEND_ERROR "${source} includes Python: ${line}")
  endforeach()
endforeach()

execute_process(COMMAND ${READELF} -d ${LIBRARY} OUTPUT_VARIABLE dynamic RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT dynamic MATCHES "NEEDED[^\n]*libc10")
  message(FATAL_ERROR "cannot read the dependencies of ${LIBRARY}: ${dynamic}")
endif()
if(dynamic MATCHES "NEEDED[^\n]*(torch_python|libpython)[^\n]*")
  message(SEND_ERROR "${LIBRARY} links Python: ${CMAKE_MATCH_0}")
endif()

execute_process(COMMAND ${NM} -D --undefined-only ${LIBRARY}
  OUTPUT_VARIABLE symbols RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT symbols MATCHES "c10")
  message(FATAL_ERROR "cannot read the symbols of ${LIBRARY}")
endif()
if(symbols MATCHES "\n[ \t]*U (_?Py[A-Z_][A-Za-z_]*|THP[A-Z][A-Za-z_]*)")
  message(SEND_ERROR "${LIBRARY} uses a Python symbol: ${CMAKE_MATCH_1}")
endif()
