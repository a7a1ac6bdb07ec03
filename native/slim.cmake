# Included by CMake at the `project(llama.cpp)` call.

# llama.cpp's `common` library is never loaded by the Python bindings: half of the build.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)

# GCC drops the stores that fill the AMX tile configuration, and the process dies at `tilezero`
# as soon as weights are repacked (docs/decisions/003-no-amx.md). AVX-512 kernels are used instead.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()
