#pragma once

namespace echo {

/// Throws NotSupported if this build has no machine code for the device, which has to be current.
/// Returns the architecture that this code was compiled for, as 10 x major + minor.
int require_device_code(int device);

}  // namespace echo
