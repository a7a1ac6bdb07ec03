# Included by CMake at the `project(llama.cpp)` call.

# llama.cpp's `common` library is never loaded by the Python bindings: half of the build.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)

# GCC drops the stores that fill the AMX tile configuration, and the process dies at `tilezero`
# as soon as weights are repacked (docs/decisions/003-no-amx.md). AVX-512 kernels are used instead.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()

# With AVX512-FP16 the vector loops of flash attention take 128 numbers at a time, so that a head of 64 falls to a loop
# over single numbers; without it they take 64, and add up in single precision (docs/decisions/020-no-avx512-fp16.md).
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-mno-avx512fp16 KNOWS_AVX512FP16)
  if(KNOWS_AVX512FP16)
    add_compile_options(-mno-avx512fp16)
  endif()
endif()
