# The extension module echo._core and its generated type stubs.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT nanobind_ROOT AND NOT nanobind_DIR)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
                  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
find_package(nanobind CONFIG REQUIRED)

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/python/bindings/*.cpp")
nanobind_add_module(_core NB_STATIC NB_SUPPRESS_WARNINGS ${sources})
target_include_directories(_core PRIVATE "${PROJECT_SOURCE_DIR}/python")
target_link_libraries(_core PRIVATE echo::echo echo_options)
# In the package: echo/_core*.so, echo/lib/libecho.so.
set_target_properties(_core PROPERTIES INSTALL_RPATH "$ORIGIN/lib")

# The stub generator imports the extension by its full name, as part of an empty package. That works
# without a GPU: nothing touches CUDA at import.
set(stub_path "${PROJECT_BINARY_DIR}/stubs")
set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${stub_path}/echo")
file(WRITE "${stub_path}/echo/__init__.py" "")
nanobind_add_stub(echo_stub MODULE echo._core PYTHON_PATH "${stub_path}" DEPENDS _core
                  OUTPUT "${PROJECT_BINARY_DIR}/_core.pyi")
