set(CMAKE_CXX_COMPILER clang++)
