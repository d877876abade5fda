# One set of rules for both: below a prefix, and below site-packages/echo in the wheel (there the
# Python build makes the package's folder the prefix).

include(CMakePackageConfigHelpers)
# No PATH: -DCMAKE_INSTALL_LIBDIR=lib64 would be taken to mean the current folder's.
set(CMAKE_INSTALL_LIBDIR lib CACHE STRING "Folder of libraries below the prefix")
set(echo_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/echo")

install(TARGETS echo EXPORT echo-targets LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY cpp/include/ DESTINATION include FILES_MATCHING PATTERN "*.hpp")
install(EXPORT echo-targets NAMESPACE echo:: DESTINATION "${echo_cmake_dir}")

configure_package_config_file(cmake/echo-config.cmake.in "${PROJECT_BINARY_DIR}/echo-config.cmake"
                              INSTALL_DESTINATION "${echo_cmake_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/echo-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/echo-config.cmake" "${PROJECT_BINARY_DIR}/echo-config-version.cmake"
        DESTINATION "${echo_cmake_dir}")

if(echo_in_wheel)
  install(TARGETS _core LIBRARY DESTINATION .)
  install(FILES "${PROJECT_BINARY_DIR}/_core.pyi" DESTINATION .)
endif()
