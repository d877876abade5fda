#include "runtime/verb_range.hpp"

#include <nvtx3/nvToolsExt.h>

#include <array>
#include <cstdio>

namespace echo {
namespace {

/// Null where no tool is attached. Asked for once: tools attach when a process starts.
nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("echo");
  return made;
}

}  // namespace

VerbRange::VerbRange(const char* verb, std::int32_t layer) noexcept {
  const nvtxDomainHandle_t tool = domain();
  if (tool == nullptr) {
    return;
  }
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), layer == kNone ? "%s" : "%s layer %d", verb, layer);
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = text.data();
  nvtxDomainRangePushEx(tool, &event);
}

VerbRange::~VerbRange() {
  if (domain() != nullptr) {
    nvtxDomainRangePop(domain());
  }
}

}  // namespace echo
