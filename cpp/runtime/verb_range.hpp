#pragma once

#include <cstdint>

#include "cache_manager/address.hpp"

namespace echo {

/// While it lives, tools that record NVTX ranges (Nsight Systems) show what the host does under a name such as "score
/// layer 7", in the domain "echo". Without such a tool it costs a load and a branch; builds without CUDA have none.
///
/// Of a replayed graph there is only "step": its verbs were called when it was captured.
class VerbRange {
 public:
  explicit VerbRange(const char* verb, std::int32_t layer = kNone) noexcept;
  ~VerbRange();
  VerbRange(const VerbRange&) = delete;
  VerbRange& operator=(const VerbRange&) = delete;
};

}  // namespace echo
