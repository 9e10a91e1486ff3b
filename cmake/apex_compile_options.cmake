# SPDX-License-Identifier: BSD-3-Clause
# Warnings and sanitizers, for this project's targets only. Consumers and parent projects do not get
# them.

function(apex_compile_options target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-Wall;-Wextra;-Wno-unused-parameter>)
  # GCC's garbage collector frees little of libtorch's headers; it took 7 % of a unity source.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=1048576>)
  if(APEX_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-Werror>)
  endif()
  if(APEX_SANITIZE)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${APEX_SANITIZE};-fno-omit-frame-pointer;-g1>)
    target_link_options(${target} PRIVATE -fsanitize=${APEX_SANITIZE})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # Under instrumentation, GCC reports torch's optional device guards as used uninitialized.
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
    endif()
    if(APEX_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # GCC warns about fences in torch's headers, which its ThreadSanitizer does not support.
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-tsan>)
    endif()
  endif()
endfunction()

# Tests run for milliseconds and compile for seconds, so they use a low optimization level. All
# targets that share a precompiled header need the same level.
function(apex_test_options target)
  apex_compile_options(${target})
  target_compile_options(${target} PRIVATE
    $<$<AND:$<CONFIG:Release>,$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>>:-O1>)
endfunction()

# apex_sources(TARGET GROUP FOLDER NAMES...): adds FOLDER/NAME.cpp to a target. With APEX_UNITY_BUILD, those of one group
# are compiled as one: GCC instantiates the pending templates of a precompiled header once per object, which takes three
# seconds each time. Sources that are added otherwise are compiled alone.
function(apex_sources target group folder)
  list(TRANSFORM ARGN REPLACE "^.+$" "${CMAKE_CURRENT_SOURCE_DIR}/${folder}/\\0.cpp")
  target_sources(${target} PRIVATE ${ARGN})
  if(APEX_UNITY_BUILD)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${group})
  endif()
endfunction()
