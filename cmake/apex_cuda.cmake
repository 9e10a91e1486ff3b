# SPDX-License-Identifier: BSD-3-Clause
# Decides whether the CUDA parts are built, and records why. Sets APEX_WITH_CUDA and
# apex_cuda_reason.
#
# Requires a libtorch that was built for CUDA, and an nvcc of the same CUDA major version with the
# runtime's headers and library. Nothing else of the toolkit is used, so a partial toolkit is
# enough. The parent's CMAKE_CUDA_ARCHITECTURES and flags are not changed.

set(APEX_WITH_CUDA OFF)
set(apex_cuda_reason "")

if(NOT APEX_CUDA)
  set(apex_cuda_reason "APEX_CUDA is OFF")
elseif(NOT Libtorch_CUDA)
  set(apex_cuda_reason "this libtorch is a CPU build")
else()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(apex_cuda_reason "no working nvcc was found (set CUDACXX or put it on PATH)")
  else()
    enable_language(CUDA)
    # CMake's own toolkit module, which uses no try_run and does not probe GPUs.
    find_package(CUDAToolkit QUIET)
    string(REGEX MATCH "^[0-9]+" apex_nvcc_major "${CMAKE_CUDA_COMPILER_VERSION}")
    string(REGEX MATCH "^[0-9]+" apex_torch_cuda_major "${Libtorch_CUDA_VERSION}")
    if(NOT TARGET CUDA::cudart_static)
      set(apex_cuda_reason
        "nvcc ${CMAKE_CUDA_COMPILER_VERSION} has no static CUDA runtime and headers beside it")
    elseif(apex_torch_cuda_major AND NOT apex_nvcc_major STREQUAL apex_torch_cuda_major)
      set(apex_cuda_reason
        "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}, but this libtorch was built for CUDA ${Libtorch_CUDA_VERSION}")
    else()
      set(APEX_WITH_CUDA ON)
      set(apex_cuda_reason
        "nvcc ${CMAKE_CUDA_COMPILER_VERSION}, libtorch for CUDA ${Libtorch_CUDA_VERSION}")
    endif()
  endif()
endif()

if(APEX_CUDA AND NOT APEX_CUDA STREQUAL "AUTO" AND NOT APEX_WITH_CUDA)
  message(FATAL_ERROR
    "APEX_CUDA=${APEX_CUDA} asks for the CUDA parts, but ${apex_cuda_reason}; "
    "install what is missing or pass -DAPEX_CUDA=OFF.")
endif()

# The architectures of this project's targets: the user's choice if given. Otherwise every
# data-center and consumer generation since Volta that this nvcc supports, and PTX of the newest one
# for later generations.
if(APEX_CUDA_ARCHITECTURES)
  set(apex_cuda_architectures ${APEX_CUDA_ARCHITECTURES})
elseif(APEX_WITH_CUDA AND apex_top_level AND CMAKE_CUDA_ARCHITECTURES
       AND DEFINED CACHE{CMAKE_CUDA_ARCHITECTURES}
       AND NOT "$CACHE{CMAKE_CUDA_ARCHITECTURES}" MATCHES "^(52|75)$")  # not nvcc's default
  set(apex_cuda_architectures "${CMAKE_CUDA_ARCHITECTURES}")
elseif(APEX_WITH_CUDA)
  set(apex_cuda_architectures 75-real 80-real 86-real 89-real 90)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(apex_cuda_architectures 75-real 80-real 86-real 89-real 90-real 100-real 120)
  endif()
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)  # later versions do not support Volta
    list(PREPEND apex_cuda_architectures 70-real)
  endif()
endif()
