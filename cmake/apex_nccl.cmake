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
  find_package(NCCL QUIET)
  if(NOT NCCL_FOUND)
    set(apex_nccl_reason "no nccl.h was found (set NCCL_ROOT)")
  else()
    # The toolkit's own folder comes first. Missing headers are in the wheels next to torch: one
    # folder per CUDA major version since 13, one per library before that.
    get_filename_component(apex_nvidia_wheels "${Libtorch_PREFIX}/../nvidia" ABSOLUTE)
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
      set(apex_nccl_reason "NCCL ${NCCL_VERSION}")  # without its folder, because this text goes into wheels
    endif()
  endif()
endif()
