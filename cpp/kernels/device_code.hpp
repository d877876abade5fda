#pragma once

namespace echo {

/// Throws NotSupported if this build has no machine code for the device, which has to be current.
void require_device_code(int device);

}  // namespace echo
