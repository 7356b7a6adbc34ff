# Builds the CUDA kernels, as a library that does not link torch, where nvcc is found.
#
# DIST_RNG_CUDA: AUTO (the default), ON (an error without nvcc), OFF.
# CMake's CUDA language is not used: it fails the whole project where nvcc exists but is broken.
set(DIST_RNG_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, ON or OFF")
if(DIST_RNG_CUDA STREQUAL "OFF")
  return()
endif()

if(NOT "$ENV{CUDACXX}" STREQUAL "")
  set(DIST_RNG_NVCC $ENV{CUDACXX} CACHE FILEPATH "The CUDA compiler")
endif()
find_program(DIST_RNG_NVCC nvcc
  HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
# PyPI's nvidia-cuda-nvcc and nvidia-cuda-runtime.
file(GLOB pypi_toolkits ${Python_SITEARCH}/nvidia/*/bin)
find_program(DIST_RNG_NVCC nvcc HINTS ${pypi_toolkits})
set(why "nvcc was not found")
if(DIST_RNG_NVCC)
  execute_process(COMMAND ${DIST_RNG_NVCC} --version OUTPUT_VARIABLE text ERROR_QUIET)
  set(version 0)
  if(text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(version ${CMAKE_MATCH_1})
  endif()
  # Compile the smallest kernel: nvcc may not support the host compiler.
  file(WRITE ${CMAKE_BINARY_DIR}/try.cu "__global__ void kernel() {}\n")
  execute_process(
    COMMAND ${DIST_RNG_NVCC} -std=c++17 -arch=sm_80 -c ${CMAKE_BINARY_DIR}/try.cu
            -o ${CMAKE_BINARY_DIR}/try.o
    RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE why)
endif()
if(NOT DIST_RNG_NVCC OR failed OR "${version}" VERSION_LESS 12.0)
  if(DIST_RNG_CUDA STREQUAL "ON")
    message(FATAL_ERROR "dist-rng: expected nvcc 12 or newer for the CUDA kernels: ${why}")
  endif()
  message(STATUS "dist-rng: built without CUDA kernels (nvcc 12 or newer is needed): ${why}")
  return()
endif()

# Code for Ampere, Hopper and Blackwell; PTX for later architectures.
set(architectures -gencode=arch=compute_80,code=sm_80)
if("${version}" VERSION_LESS 12.8)
  list(APPEND architectures "-gencode=arch=compute_90,code=[sm_90,compute_90]")
else()
  list(APPEND architectures -gencode=arch=compute_90,code=sm_90
    "-gencode=arch=compute_100,code=[sm_100,compute_100]")
endif()
file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/*.cu)
file(GLOB cuda_headers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/*.cuh
  ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/*.h ${CMAKE_CURRENT_SOURCE_DIR}/src/cpp/dtype.h
  ${CMAKE_CURRENT_SOURCE_DIR}/src/cpp/philox/*.h)
set(cuda_objects)
foreach(source ${cuda_sources})
  get_filename_component(name ${source} NAME_WE)
  set(object ${CMAKE_BINARY_DIR}/cuda/${name}.o)
  # No fast-math: the source calls __sinf, __cosf and __logf where torch's does.
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda
    COMMAND ${DIST_RNG_NVCC} -std=c++17 -O3 -Xcompiler=-fPIC -Xfatbin=-compress-all
            -DDIST_RNG_ISA=device ${architectures} -c ${source} -o ${object}
    DEPENDS ${source} ${cuda_headers} VERBATIM)
  list(APPEND cuda_objects ${object})
endforeach()
set(library ${CMAKE_BINARY_DIR}/libdist_rng_cuda.so)
add_custom_command(OUTPUT ${library}
  COMMAND ${DIST_RNG_NVCC} --shared -cudart static ${cuda_objects} -o ${library}
  DEPENDS ${cuda_objects} VERBATIM)
add_custom_target(dist_rng_cuda ALL DEPENDS ${library})
install(FILES ${library} DESTINATION dist_rng)
