#pragma once

#include "kernels/params.hpp"

namespace echo {

/// See BeginParams. Throws StateError if a position lies beyond its block table.
void note_owners(const BeginParams& params);

}  // namespace echo
