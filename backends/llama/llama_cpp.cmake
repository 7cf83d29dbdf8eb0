# Read by CMake behind llama.cpp's project(): what llama-cpp-python switches on and nothing here uses
# stays out. Its tools' common code takes 44% of the time that llama.cpp compiles.
set(LLAMA_BUILD_COMMON OFF)
