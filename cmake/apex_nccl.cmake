# SPDX-License-Identifier: BSD-3-Clause
# Decides whether the NCCL backend of apex::distributed is built, and records why. Sets
# APEX_WITH_NCCL, apex_nccl_reason and apex_nccl_include_dirs. Included after apex_cuda.
#
# The header of torch's NCCL backend needs nccl.h and, through ATen's CUDA headers, those of cuBLAS,
# cuSOLVER and cuSPARSE. Only headers are needed, because the code is in libtorch_cuda.

set(APEX_WITH_NCCL OFF)
set(apex_nccl_include_dirs)
if(NOT APEX_WITH_CUDA)
  set(apex_nccl_reason "the CUDA parts are off")
else()
  get_filename_component(apex_nvidia_wheels "${Libtorch_PREFIX}/../nvidia" ABSOLUTE)
  # The wheel is searched before the system, because libtorch was built with it.
  find_path(NCCL_INCLUDE_DIR NAMES nccl.h
    HINTS "${NCCL_ROOT}" "$ENV{NCCL_ROOT}" "${apex_nvidia_wheels}/nccl"
    PATHS /usr/local/cuda
    PATH_SUFFIXES include)
  mark_as_advanced(NCCL_INCLUDE_DIR)
  if(NOT NCCL_INCLUDE_DIR)
    set(apex_nccl_reason "no nccl.h was found (set NCCL_ROOT)")
  else()
    file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" apex_nccl_version
      REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) +[0-9]+")
    string(REGEX REPLACE "#define NCCL_[A-Z]+ +" "" apex_nccl_version "${apex_nccl_version}")
    string(REPLACE ";" "." apex_nccl_version "${apex_nccl_version}")
    # The toolkit's own folder comes first. Missing headers are in the wheels next to torch: one
    # folder per CUDA major version since 13, one per library before that.
    string(REGEX MATCH "^[0-9]+" apex_nccl_cuda "${Libtorch_CUDA_VERSION}")
    set(apex_nccl_missing)
    foreach(header IN ITEMS cublas_v2.h cusolverDn.h cusparse.h)
      string(REGEX REPLACE "(_v2|Dn)?\\.h$" "" library "${header}")
      find_path(APEX_${library}_INCLUDE_DIR NAMES ${header}
        HINTS ${CUDAToolkit_INCLUDE_DIRS}
        PATHS "${apex_nvidia_wheels}/cu${apex_nccl_cuda}/include"
              "${apex_nvidia_wheels}/${library}/include")
      mark_as_advanced(APEX_${library}_INCLUDE_DIR)
      if(APEX_${library}_INCLUDE_DIR)
        list(APPEND apex_nccl_include_dirs "${APEX_${library}_INCLUDE_DIR}")
      else()
        list(APPEND apex_nccl_missing ${header})
      endif()
    endforeach()
    if(apex_nccl_missing)
      list(JOIN apex_nccl_missing " and " apex_nccl_missing)
      set(apex_nccl_reason "${apex_nccl_missing} was not found in the toolkit or beside torch")
    else()
      list(REMOVE_DUPLICATES apex_nccl_include_dirs)
      list(REMOVE_ITEM apex_nccl_include_dirs ${CUDAToolkit_INCLUDE_DIRS})
      set(APEX_WITH_NCCL ON)
      set(apex_nccl_reason "NCCL ${apex_nccl_version}")  # without its folder, because this text goes into wheels
    endif()
  endif()
endif()
