# What bench/*.py loads: bench/native in one shared library, linked with the objects of the library.

if(NOT echo_with_cuda)
  message(FATAL_ERROR "ECHO_BUILD_BENCH needs the CUDA backend")
endif()
file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bench/native/*.cu")
add_library(echo_bench SHARED ${sources})
target_include_directories(echo_bench PRIVATE "${PROJECT_SOURCE_DIR}/cpp/include" "${PROJECT_SOURCE_DIR}/cpp")
target_compile_definitions(echo_bench PRIVATE ECHO_BUILDING)
target_link_libraries(echo_bench PRIVATE echo_objects echo_options)
target_link_options(echo_bench PRIVATE LINKER:--exclude-libs,ALL LINKER:--no-undefined)
