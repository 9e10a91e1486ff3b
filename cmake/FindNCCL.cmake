# SPDX-License-Identifier: BSD-3-Clause
# FindNCCL
# --------
# Finds NCCL's header and library: in NCCL_ROOT (CMake or environment variable), in the nvidia-nccl
# wheel beside the torch package that FindLibtorch found, or on the system.
#
# The wheel is searched before the system, because libtorch was built with it and a process should
# not load two NCCL versions.
#
# Sets
#   NCCL_FOUND, NCCL_VERSION (2.27.3), NCCL_INCLUDE_DIR, NCCL_LIBRARY (may be empty: libtorch loads
#   the library, so code that only uses c10d needs only the header)
# and the imported target
#   NCCL::nccl   header and, if found, library

include_guard(DIRECTORY)
include(FindPackageHandleStandardArgs)

set(_nccl_wheel)
if(Libtorch_PREFIX)
  get_filename_component(_nccl_wheel "${Libtorch_PREFIX}/../nvidia/nccl" ABSOLUTE)
endif()

find_path(NCCL_INCLUDE_DIR NAMES nccl.h
  HINTS "${NCCL_ROOT}" "$ENV{NCCL_ROOT}" "${_nccl_wheel}"
  PATHS /usr/local/cuda
  PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2
  HINTS "${NCCL_ROOT}" "$ENV{NCCL_ROOT}" "${_nccl_wheel}"
  PATHS /usr/local/cuda
  PATH_SUFFIXES lib lib64)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

set(NCCL_VERSION "")
if(NCCL_INCLUDE_DIR)
  file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" _nccl_lines
    REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX REPLACE "#define NCCL_[A-Z]+ +" "" _nccl_parts "${_nccl_lines}")
  string(REPLACE ";" "." NCCL_VERSION "${_nccl_parts}")
endif()

find_package_handle_standard_args(NCCL
  REQUIRED_VARS NCCL_INCLUDE_DIR
  VERSION_VAR NCCL_VERSION
  REASON_FAILURE_MESSAGE
    "No nccl.h was found: install the nvidia-nccl wheel that belongs to torch, install NCCL's development package, or pass -DNCCL_ROOT=<prefix>.")

if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
  add_library(NCCL::nccl INTERFACE IMPORTED)
  target_include_directories(NCCL::nccl INTERFACE "${NCCL_INCLUDE_DIR}")
  if(NCCL_LIBRARY)
    target_link_libraries(NCCL::nccl INTERFACE "${NCCL_LIBRARY}")
  endif()
endif()
