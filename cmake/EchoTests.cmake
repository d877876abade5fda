# The C++ tests: one executable of all tests/cpp/*.cpp, and with CUDA *.cu, linked with the objects of the library.

enable_testing()
find_package(GTest REQUIRED)
include(GoogleTest)

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/cpp/*.cpp")
if(echo_with_cuda)
  file(GLOB cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/cpp/*.cu")
  if(NOT echo_nvtx)
    list(FILTER cuda_sources EXCLUDE REGEX "cuda_verb_range_test")
  endif()
  list(APPEND sources ${cuda_sources})
endif()
add_executable(echo_tests ${sources})
target_include_directories(echo_tests PRIVATE
  "${PROJECT_SOURCE_DIR}/cpp/include" "${PROJECT_SOURCE_DIR}/cpp" "${PROJECT_SOURCE_DIR}/tests/cpp")
target_compile_definitions(echo_tests PRIVATE ECHO_BUILDING)
target_link_libraries(echo_tests PRIVATE echo_objects echo_options GTest::gtest_main)
set_target_properties(echo_tests PROPERTIES LINKER_LANGUAGE CXX)
gtest_discover_tests(echo_tests DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 300)
