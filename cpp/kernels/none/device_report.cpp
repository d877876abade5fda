#include "echo/device_report.hpp"

namespace echo {

DeviceReport device_report(int /*device*/) {
  DeviceReport report;
  report.problem = "this build has no CUDA backend; build with ECHO_CUDA=ON, which needs nvcc";
  return report;
}

}  // namespace echo
