#include "echo/runtime.hpp"

namespace echo {

std::string build_info() {
  const std::string version = std::string("echo ") + ECHO_VERSION_STRING;
  const std::string_view architectures = ECHO_CUDA_ARCHITECTURES_STRING;
  return architectures.empty() ? version + ", CPU only" : version + ", CUDA for " + std::string(architectures);
}

}  // namespace echo
