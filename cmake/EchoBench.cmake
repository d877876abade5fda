# libecho_bench: what the benchmarks in bench/ time, behind a C API for ctypes. Linked with the objects of the library,
# like the C++ tests.

if(NOT echo_with_cuda)
  message(FATAL_ERROR "ECHO_BUILD_BENCH=ON needs the CUDA backend (ECHO_CUDA=ON)")
endif()

file(GLOB sources CONFIGURE_DEPENDS
  "${PROJECT_SOURCE_DIR}/bench/native/*.cpp" "${PROJECT_SOURCE_DIR}/bench/native/*.cu")
add_library(echo_bench SHARED ${sources})
target_include_directories(echo_bench PRIVATE "${PROJECT_SOURCE_DIR}/cpp/include" "${PROJECT_SOURCE_DIR}/cpp")
target_compile_definitions(echo_bench PRIVATE ECHO_BUILDING)
target_compile_options(echo_bench PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wshadow;-Wconversion>")
target_link_libraries(echo_bench PRIVATE echo_objects echo_options)
target_link_options(echo_bench PRIVATE LINKER:--exclude-libs,ALL LINKER:--no-undefined)
set_target_properties(echo_bench PROPERTIES LINKER_LANGUAGE CXX)
