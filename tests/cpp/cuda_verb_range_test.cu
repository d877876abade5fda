// What a tool that records NVTX ranges sees of a runtime. The tool is this file: NVTX finds its entry point by name.

#include <gtest/gtest.h>

#define NVTX_NO_IMPL  // this is a tool
#include <nvtx3/nvToolsExt.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime_world.hpp"

namespace {

struct Tool {
  bool records = false;  // the process's other tests have no use for it
  std::vector<std::string> seen;
};

Tool& tool() {
  static Tool made;
  return made;
}

nvtxDomainHandle_t create_domain(const char* name) {
  static const char domain = 0;  // any address
  return std::string(name) == "echo" ? reinterpret_cast<nvtxDomainHandle_t>(const_cast<char*>(&domain)) : nullptr;
}

int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  if (tool().records) {
    tool().seen.emplace_back(event->message.ascii);
  }
  return 0;
}

int pop(nvtxDomainHandle_t) {
  if (tool().records) {
    tool().seen.emplace_back("/");
  }
  return 0;
}

int attach(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) {
    return 0;
  }
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(&create_domain);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(&push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
  return 1;
}

}  // namespace

extern "C" {
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = &attach;
}

namespace echo::runtime_test {
namespace {

TEST(VerbRange, AToolSeesTheVerbsOfAStepByLayer) {
  const auto impl = std::make_shared<RuntimeImpl>(small_shape(), small_config());
  TableModel model(small_shape());
  const Session session = impl->open_session(200);
  impl->prefill(session, some_tokens(20), std::ref(model));
  Batch batch;
  batch.add(session, 5);
  tool() = {.records = true, .seen = {}};
  impl->step(batch, std::ref(model));
  tool().records = false;
  std::vector<std::string> expected{"step", "begin", "/"};
  for (const char* layer : {" layer 0", " layer 1"}) {
    for (const char* verb : {"score", "select", "recall", "attend"}) {
      expected.insert(expected.end(), {std::string(verb) + layer, "/"});
    }
  }
  expected.insert(expected.end(), {"commit", "/", "/"});
  EXPECT_EQ(tool().seen, expected);
}

}  // namespace
}  // namespace echo::runtime_test
