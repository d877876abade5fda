#include "runtime/verb_range.hpp"

namespace echo {

VerbRange::VerbRange(const char* /*verb*/, std::int32_t /*layer*/) noexcept {}
VerbRange::~VerbRange() = default;

}  // namespace echo
