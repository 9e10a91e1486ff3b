# SPDX-License-Identifier: BSD-3-Clause
# FindLibtorch
# ------------
# Finds libtorch inside a PyTorch wheel or an unpacked libtorch archive, without torch's own
# find_package(Torch). That one fails for a CUDA build on a machine without the full CUDA toolkit,
# and it changes CMAKE_CUDA_ARCHITECTURES and CMAKE_CUDA_FLAGS of the calling project.
#
# Search order:
#   Libtorch_ROOT, Torch_ROOT, TORCH_INSTALL_PREFIX,
#   Torch_DIR (share/cmake/Torch of a torch), an entry of CMAKE_PREFIX_PATH that holds a torch (each
#   of them a CMake or an environment variable),
#   the torch of the Python interpreter in Python_EXECUTABLE or, without one, of python3.
# If Libtorch_ROOT names a folder, only that folder is searched.
#
# Sets
#   Libtorch_FOUND, Libtorch_VERSION (2.13.0), Libtorch_FULL_VERSION (2.13.0+cpu)
#   Libtorch_PREFIX, Libtorch_INCLUDE_DIRS, Libtorch_LIBRARY_DIR
#   Libtorch_CUDA          ON when this libtorch was built for CUDA
#   Libtorch_CUDA_VERSION  its CUDA version (13.0), empty for CPU builds
#   Libtorch_CXX11_ABI     0 or 1, as libtorch was built
#   Libtorch_CXX_STANDARD  the least C++ standard that its headers compile with
#   Libtorch_NOT_FOUND_REASON  "found none", or that Libtorch_ROOT holds none
# and the imported targets
#   Libtorch::libtorch       headers, libtorch_cpu, libc10 and the macros they need
#   Libtorch::libtorch_cuda  adds libtorch_cuda and libc10_cuda (CUDA builds only)
#   Libtorch::python         libtorch_python (wheels only; never part of the C++ library)
#
# Uses no network, no try_run, and no information about the machine's GPU.

# Imported targets are visible in the calling folder and below, or everywhere if
# CMAKE_FIND_PACKAGE_TARGETS_GLOBAL is on. CMake behaves this way since 3.24.
#
# No include_guard, because each caller needs the variables in its scope. Targets are created once.

include(FindPackageHandleStandardArgs)

# Sets Libtorch_PREFIX, if it is not set, to a folder that has the umbrella header and libc10.
macro(_libtorch_try folder)
  get_filename_component(_libtorch_folder "${folder}" ABSOLUTE)
  if(NOT Libtorch_PREFIX
     AND EXISTS "${_libtorch_folder}/include/torch/csrc/api/include/torch/torch.h"
     AND EXISTS "${_libtorch_folder}/lib/libc10${CMAKE_SHARED_LIBRARY_SUFFIX}")
    set(Libtorch_PREFIX "${_libtorch_folder}")
  endif()
endmacro()

function(_libtorch_ask_python out)
  set(${out} "" PARENT_SCOPE)
  if(Python_EXECUTABLE)
    set(interpreter "${Python_EXECUTABLE}")
  elseif(PYTHON_EXECUTABLE)
    set(interpreter "${PYTHON_EXECUTABLE}")
  else()
    find_program(LIBTORCH_PYTHON_PROGRAM NAMES python3 python)
    mark_as_advanced(LIBTORCH_PYTHON_PROGRAM)
    set(interpreter "${LIBTORCH_PYTHON_PROGRAM}")
  endif()
  if(NOT interpreter)
    return()
  endif()
  # find_spec locates the package without importing it (an import takes seconds). Without '', so
  # that a folder named torch in the working folder, as in a clone of PyTorch, is not mistaken for
  # it.
  execute_process(
    COMMAND "${interpreter}" -c
      "import importlib.util as u, sys; sys.path = list(filter(None, sys.path)); s = u.find_spec('torch'); print(list(s.submodule_search_locations)[0] if s else '')"
    OUTPUT_VARIABLE location OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0 AND location)
    set(${out} "${location}" PARENT_SCOPE)
  else()
    unset(LIBTORCH_PYTHON_PROGRAM CACHE)  # the next run may find another python3 on PATH
  endif()
endfunction()

set(_libtorch_root "${Libtorch_ROOT}")
if(NOT _libtorch_root)
  set(_libtorch_root "$ENV{Libtorch_ROOT}")
endif()
set(_libtorch_hints "${_libtorch_root}")
if(NOT _libtorch_root)
  set(_libtorch_hints "${Torch_ROOT}" "$ENV{Torch_ROOT}"
    "${TORCH_INSTALL_PREFIX}" "$ENV{TORCH_INSTALL_PREFIX}")
  foreach(_libtorch_hint IN ITEMS "${Torch_DIR}" "$ENV{Torch_DIR}")
    if(_libtorch_hint)
      list(APPEND _libtorch_hints "${_libtorch_hint}/../../..")
    endif()
  endforeach()
  string(REPLACE ":" ";" _libtorch_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(_libtorch_hint IN LISTS CMAKE_PREFIX_PATH _libtorch_prefixes)
    # torch.utils.cmake_prefix_path is <torch>/share/cmake.
    list(APPEND _libtorch_hints "${_libtorch_hint}" "${_libtorch_hint}/../..")
  endforeach()
endif()

set(Libtorch_PREFIX "")
foreach(_libtorch_hint IN LISTS _libtorch_hints)
  if(_libtorch_hint)
    _libtorch_try("${_libtorch_hint}")
    _libtorch_try("${_libtorch_hint}/torch")
  endif()
endforeach()
set(Libtorch_NOT_FOUND_REASON "found none")
if(NOT Libtorch_PREFIX AND _libtorch_root)
  set(Libtorch_NOT_FOUND_REASON "Libtorch_ROOT, ${_libtorch_root}, holds none")
elseif(NOT Libtorch_PREFIX)
  _libtorch_ask_python(_libtorch_hint)
  if(_libtorch_hint)
    _libtorch_try("${_libtorch_hint}")
  endif()
endif()

if(Libtorch_PREFIX)
  set(Libtorch_INCLUDE_DIRS
    "${Libtorch_PREFIX}/include" "${Libtorch_PREFIX}/include/torch/csrc/api/include")
  set(Libtorch_LIBRARY_DIR "${Libtorch_PREFIX}/lib")

  # Version: from version.py in a wheel, build-version in an archive, and a header in both.
  set(Libtorch_FULL_VERSION "")
  set(Libtorch_CUDA_VERSION "")
  if(EXISTS "${Libtorch_PREFIX}/version.py")
    file(STRINGS "${Libtorch_PREFIX}/version.py" _libtorch_lines)
    foreach(_libtorch_line IN LISTS _libtorch_lines)
      if(_libtorch_line MATCHES "^__version__ = '([^']+)'")
        set(Libtorch_FULL_VERSION "${CMAKE_MATCH_1}")
      elseif(_libtorch_line MATCHES "^cuda.*= '([0-9.]+)'")
        set(Libtorch_CUDA_VERSION "${CMAKE_MATCH_1}")
      endif()
    endforeach()
  elseif(EXISTS "${Libtorch_PREFIX}/build-version")
    file(READ "${Libtorch_PREFIX}/build-version" Libtorch_FULL_VERSION)
    string(STRIP "${Libtorch_FULL_VERSION}" Libtorch_FULL_VERSION)
  endif()
  set(_libtorch_header "")
  foreach(_libtorch_hint IN ITEMS
      torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${Libtorch_PREFIX}/include/${_libtorch_hint}")
      file(READ "${Libtorch_PREFIX}/include/${_libtorch_hint}" _libtorch_text)
      string(APPEND _libtorch_header "${_libtorch_text}")
    endif()
  endforeach()
  set(Libtorch_VERSION "")
  foreach(_libtorch_part IN ITEMS MAJOR MINOR PATCH)
    if(_libtorch_header MATCHES "TORCH_VERSION_${_libtorch_part} ([0-9]+)")
      list(APPEND Libtorch_VERSION "${CMAKE_MATCH_1}")
    endif()
  endforeach()
  string(REPLACE ";" "." Libtorch_VERSION "${Libtorch_VERSION}")
  if(NOT Libtorch_FULL_VERSION)
    set(Libtorch_FULL_VERSION "${Libtorch_VERSION}")
  endif()

  # Flavor: depends only on the package, not on the machine.
  if(EXISTS "${Libtorch_LIBRARY_DIR}/libtorch_cuda${CMAKE_SHARED_LIBRARY_SUFFIX}")
    set(Libtorch_CUDA ON)
    if(NOT Libtorch_CUDA_VERSION AND Libtorch_FULL_VERSION MATCHES "cu([0-9]+)([0-9])$")
      set(Libtorch_CUDA_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
    endif()
  else()
    set(Libtorch_CUDA OFF)
    set(Libtorch_CUDA_VERSION "")
  endif()

  # C++ ABI, from the package's own CMake file.
  set(Libtorch_CXX11_ABI 1)
  set(_libtorch_config "${Libtorch_PREFIX}/share/cmake/Torch/TorchConfig.cmake")
  if(EXISTS "${_libtorch_config}")
    file(READ "${_libtorch_config}" _libtorch_text)
    if(_libtorch_text MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
      set(Libtorch_CXX11_ABI "${CMAKE_MATCH_1}")
    endif()
  endif()

  if(Libtorch_VERSION VERSION_LESS 2.14)
    set(Libtorch_CXX_STANDARD 17)
  else()
    set(Libtorch_CXX_STANDARD 20)
  endif()
endif()

find_package_handle_standard_args(Libtorch
  REQUIRED_VARS Libtorch_PREFIX
  VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE
    "libtorch is needed, but ${Libtorch_NOT_FOUND_REASON}. Install PyTorch into the Python that runs this build (pip install torch), or pass -DLibtorch_ROOT=<folder of an unpacked libtorch archive or of the torch package>."
)

if(Libtorch_FOUND AND NOT TARGET Libtorch::libtorch)
  set(_libtorch_global "")
  if(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
    set(_libtorch_global GLOBAL)
  endif()
  foreach(_libtorch_name IN ITEMS c10 torch_cpu torch c10_cuda torch_cuda torch_python)
    set(_libtorch_file
      "${Libtorch_LIBRARY_DIR}/lib${_libtorch_name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
    if(EXISTS "${_libtorch_file}")
      add_library(Libtorch::_${_libtorch_name} SHARED IMPORTED ${_libtorch_global})
      set_target_properties(Libtorch::_${_libtorch_name} PROPERTIES
        IMPORTED_LOCATION "${_libtorch_file}")
    endif()
  endforeach()

  add_library(Libtorch::libtorch INTERFACE IMPORTED ${_libtorch_global})
  # SYSTEM (the default of imported targets) suppresses warnings in torch's headers.
  target_include_directories(Libtorch::libtorch INTERFACE ${Libtorch_INCLUDE_DIRS})
  target_compile_definitions(Libtorch::libtorch INTERFACE
    _GLIBCXX_USE_CXX11_ABI=${Libtorch_CXX11_ABI})
  target_compile_features(Libtorch::libtorch INTERFACE cxx_std_${Libtorch_CXX_STANDARD})
  target_link_libraries(Libtorch::libtorch INTERFACE Libtorch::_torch_cpu Libtorch::_c10)

  if(Libtorch_CUDA)
    add_library(Libtorch::libtorch_cuda INTERFACE IMPORTED ${_libtorch_global})
    target_link_libraries(Libtorch::libtorch_cuda INTERFACE
      Libtorch::libtorch Libtorch::_torch_cuda Libtorch::_c10_cuda)
  endif()
  if(TARGET Libtorch::_torch_python)
    add_library(Libtorch::python INTERFACE IMPORTED ${_libtorch_global})
    target_link_libraries(Libtorch::python INTERFACE Libtorch::libtorch Libtorch::_torch_python)
  endif()
endif()
