# Read by CMake behind llama.cpp's project(). The libraries decode at the same speed: all that computes
# is in ggml, which is left as it is.
# - What llama-cpp-python switches on and nothing here uses stays out.
# - The files of 200 models spend nine tenths of their time on the same headers.
# - Outside of ggml -O3 takes a third longer than -O2; what makes graphs of images alone takes 1.6
#   times as long with -O2 as with -O1.
set(LLAMA_BUILD_COMMON OFF)

function(compile_quickly target level)
  if(TARGET ${target} AND NOT MSVC)
    target_precompile_headers(${target} PRIVATE <algorithm> <array> <cmath> <functional> <map> <memory>
      <mutex> <regex> <set> <sstream> <stdexcept> <string> <thread> <unordered_map> <vector>)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:${level}>)
  endif()
endfunction()
cmake_language(DEFER CALL compile_quickly llama -O2)
cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL compile_quickly mtmd -O1)
