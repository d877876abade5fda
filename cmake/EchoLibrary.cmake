# libecho. Its sources are compiled into object libraries, one per role, so that the C++ tests can link
# the same objects and reach what the shared library hides.

find_package(Threads REQUIRED)

# An object library of the given sources with our include paths and flags; nothing without sources.
function(echo_add_objects name)
  if(NOT ARGN)
    return()
  endif()
  add_library(${name} OBJECT ${ARGN})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/cpp/include" "${PROJECT_SOURCE_DIR}/cpp")
  target_compile_definitions(${name} PRIVATE ECHO_BUILDING)
  target_link_libraries(${name} PRIVATE echo_options)
  # Only here: macros of GoogleTest and templates of nanobind would not pass.
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wshadow;-Wconversion>")
  set_property(GLOBAL APPEND PROPERTY echo_object_libraries ${name})
endfunction()

function(echo_glob out)
  list(TRANSFORM ARGN PREPEND "${PROJECT_SOURCE_DIR}/cpp/")
  file(GLOB sources CONFIGURE_DEPENDS ${ARGN})
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# The runtime.
echo_glob(sources runtime/*.cpp cache_manager/*.cpp)
echo_add_objects(echo_runtime ${sources})
set(build_architectures "")
if(echo_with_cuda)
  string(REPLACE ";" "," build_architectures "${ECHO_CUDA_ARCHITECTURES}")
endif()
# Only for the file that reports them, so that nothing else depends on them.
set_source_files_properties("${PROJECT_SOURCE_DIR}/cpp/runtime/build_info.cpp" PROPERTIES COMPILE_DEFINITIONS
  "ECHO_VERSION_STRING=\"${ECHO_VERSION}\";ECHO_CUDA_ARCHITECTURES_STRING=\"${build_architectures}\"")

# The CPU backend: always there. No contraction into fused multiply-adds: it is what other
# implementations are compared with, so it rounds as it is written, on every CPU.
echo_glob(sources reference/*.cpp)
echo_add_objects(echo_reference ${sources})
if(TARGET echo_reference)
  target_compile_options(echo_reference PRIVATE -ffp-contract=off)
endif()

# Its inner loops: the same files once per instruction set, each in a namespace of its own; which one
# runs is decided at run time. All give the same bits.
echo_glob(sources reference/simd/*.cpp)
function(echo_add_simd name)
  echo_add_objects(echo_${name} ${sources})
  target_compile_definitions(echo_${name} PRIVATE ECHO_SIMD_NAMESPACE=${name})
  target_compile_options(echo_${name} PRIVATE -Wno-psabi -ffp-contract=off ${ARGN})
endfunction()
if(sources)
  echo_add_simd(simd_base)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    echo_add_simd(simd_avx2 -mavx2 -mfma -mf16c)
    echo_add_simd(simd_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)
    target_compile_definitions(echo_reference PRIVATE ECHO_SIMD_X86=1)
  endif()
endif()

# The CUDA backend, or the stand-in that says there is none: the choice is what gets linked.
if(echo_with_cuda)
  echo_glob(sources kernels/*.cu kernels/*.cpp cache_manager/*.cu)
  find_path(echo_nvtx nvtx3/nvToolsExt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} NO_CACHE)
  if(NOT echo_nvtx)  # a part of the toolkit that may be left out
    list(REMOVE_ITEM sources "${PROJECT_SOURCE_DIR}/cpp/kernels/verb_range.cpp")
    list(APPEND sources "${PROJECT_SOURCE_DIR}/cpp/kernels/none/verb_range.cpp")
  endif()
  echo_add_objects(echo_cuda ${sources})
  if(TARGET echo_cuda)
    target_link_libraries(echo_cuda PRIVATE CUDA::cudart_static)
    # Kernels for Hopper's own instructions are empty in code for other architectures: not to be chosen then.
    if("90a" IN_LIST ECHO_CUDA_ARCHITECTURES)
      target_compile_definitions(echo_cuda PRIVATE ECHO_SM90A=1)
    endif()
  endif()
else()
  echo_glob(sources kernels/none/*.cpp)
  echo_add_objects(echo_no_cuda ${sources})
endif()

# All objects and what they need, under one name. cudart is linked statically and its symbols are
# hidden: users need no CUDA toolkit, and the copy does not meet the one in torch.
add_library(echo_objects INTERFACE)
get_property(object_libraries GLOBAL PROPERTY echo_object_libraries)
if(NOT object_libraries)
  message(FATAL_ERROR "echo: no sources found under cpp/")
endif()
foreach(name IN LISTS object_libraries)
  target_sources(echo_objects INTERFACE $<TARGET_OBJECTS:${name}>)
endforeach()
target_link_libraries(echo_objects INTERFACE Threads::Threads)
if(echo_with_cuda)
  target_link_libraries(echo_objects INTERFACE CUDA::cudart_static)
endif()

# No SOVERSION: wheels cannot hold symbolic links, and before 1.0 every release may change the ABI.
add_library(echo SHARED)
add_library(echo::echo ALIAS echo)
target_link_libraries(echo PRIVATE echo_objects)
target_compile_features(echo PUBLIC cxx_std_20)
target_include_directories(echo PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/cpp/include>
  $<INSTALL_INTERFACE:include>)
target_link_options(echo PRIVATE LINKER:--exclude-libs,ALL LINKER:--no-undefined)
set_target_properties(echo PROPERTIES LINKER_LANGUAGE CXX)
if(ECHO_SANITIZE)
  # A sanitizer's runtime is left to the executable.
  set_target_properties(echo PROPERTIES LINK_OPTIONS "LINKER:--exclude-libs,ALL")
endif()
