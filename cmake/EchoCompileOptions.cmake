# Flags of everything that is compiled here: target echo_options, never exported.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
if(echo_with_cuda AND NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")  # CMake 3.25.1 does not know it yet
endif()
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(echo_options INTERFACE)
target_compile_options(echo_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wnon-virtual-dtor;-Woverloaded-virtual>"
  # No -Wpedantic for nvcc: it objects to the code that nvcc itself generates.
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow;-lineinfo>")

if(ECHO_WERROR)
  target_compile_options(echo_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>")
endif()

if(echo_with_cuda)
  foreach(arch IN LISTS ECHO_CUDA_ARCHITECTURES)
    target_compile_options(echo_options INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_${arch},code=sm_${arch}>)
  endforeach()
endif()

if(ECHO_SANITIZE)
  set(echo_sanitizers "${ECHO_SANITIZE}")
  if(echo_sanitizers MATCHES "^(ON|TRUE|YES|1)$")
    set(echo_sanitizers "address,undefined")
  endif()
  # For the whole tree, tests included: code with and without sanitizers does not mix well.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${echo_sanitizers};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_compile_definitions(_GLIBCXX_ASSERTIONS)
  add_link_options(-fsanitize=${echo_sanitizers})
endif()
