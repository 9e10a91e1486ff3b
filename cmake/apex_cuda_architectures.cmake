# SPDX-License-Identifier: BSD-3-Clause
# apex_default_cuda_architectures(VERSION RESULT): every data-center and consumer generation since
# Volta that an nvcc of that version supports, and PTX of the newest one for later generations.
function(apex_default_cuda_architectures version result)
  if(version VERSION_GREATER_EQUAL 12.8)
    set(apex_cuda_architectures 75-real 80-real 86-real 89-real 90-real 100-real 120)
  else()
    set(apex_cuda_architectures 75-real 80-real 86-real 89-real 90)
  endif()
  if(version VERSION_LESS 13)  # later versions do not support Volta
    list(PREPEND apex_cuda_architectures 70-real)
  endif()
  set(${result} ${apex_cuda_architectures} PARENT_SCOPE)
endfunction()
