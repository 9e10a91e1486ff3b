# SPDX-License-Identifier: BSD-3-Clause
# Fails if the built library links or uses Python. Run with cmake -P; needs LIBRARY, READELF and NM.
execute_process(COMMAND ${READELF} -d ${LIBRARY} OUTPUT_VARIABLE dynamic COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${NM} -D --undefined-only ${LIBRARY}
  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
if(NOT dynamic MATCHES "NEEDED[^\n]*libc10" OR NOT symbols MATCHES "c10")
  message(FATAL_ERROR "cannot read the dependencies of ${LIBRARY}: ${dynamic}")
endif()
if(dynamic MATCHES "NEEDED[^\n]*(torch_python|libpython)[^\n]*")
  message(SEND_ERROR "${LIBRARY} links Python: ${CMAKE_MATCH_0}")
endif()
if(symbols MATCHES "\n[ \t]*U (_?Py[A-Z_][A-Za-z_]*|THP[A-Z][A-Za-z_]*)")
  message(SEND_ERROR "${LIBRARY} uses a Python symbol: ${CMAKE_MATCH_1}")
endif()
