# Decides whether the CUDA backend is built: sets echo_with_cuda and says why.
#   ON    it must be; anything missing is an error
#   AUTO  it is, where a usable toolkit is found
#   OFF   it is not; no toolkit is looked for

set(echo_with_cuda OFF)
set(echo_cuda_minimum 12.4)  # first with everything the sm_90a kernels use, in C++20

string(TOUPPER "${ECHO_CUDA}" echo_cuda_mode)
if(NOT echo_cuda_mode MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "ECHO_CUDA is '${ECHO_CUDA}'; it must be AUTO, ON or OFF")
endif()

if(echo_cuda_mode STREQUAL "OFF")
  message(STATUS "echo: CUDA backend OFF (ECHO_CUDA=OFF): CPU only")
  return()
endif()

# Architectures are given below, spelled out: CMake's own property would add a PTX variant, which
# sm_90a does not have.
set(CMAKE_CUDA_ARCHITECTURES OFF)

set(echo_cuda_problem "")
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  set(echo_cuda_problem "no working CUDA compiler (nvcc) found")
else()
  enable_language(CUDA)
  find_package(CUDAToolkit QUIET)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS echo_cuda_minimum)
    set(echo_cuda_problem
        "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than ${echo_cuda_minimum}")
  elseif(NOT TARGET CUDA::cudart_static)
    set(echo_cuda_problem "the static CUDA runtime (libcudart_static.a) was not found")
  endif()
endif()

if(echo_cuda_problem STREQUAL "")
  set(echo_with_cuda ON)
  message(STATUS "echo: CUDA backend ON (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, "
                 "architectures ${ECHO_CUDA_ARCHITECTURES})")
elseif(echo_cuda_mode STREQUAL "ON")
  message(FATAL_ERROR "ECHO_CUDA=ON, but ${echo_cuda_problem}")
else()
  message(STATUS "echo: CUDA backend OFF (${echo_cuda_problem}): CPU only")
endif()
