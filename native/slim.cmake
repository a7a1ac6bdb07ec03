# Included by CMake at the `project(llama.cpp)` call: leaves out llama.cpp's `common`
# library, which the Python bindings never load. Halves the build.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)
