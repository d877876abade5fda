#pragma once
// A session whose passes are recorded, verb by verb.

#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "recording_backend.hpp"
#include "runtime_world.hpp"

namespace echo::runtime_test {

class Pass : public ::testing::Test {
 protected:
  Pass() : impl(std::make_shared<RuntimeImpl>(small_shape(), small_config())), model(small_shape()) {
    backend = std::make_shared<RecordingBackend>(RuntimeTestAccess::backend(*impl));
    RuntimeTestAccess::use_backend(*impl, backend);
    session = impl->open_session(200);
    impl->prefill(session, some_tokens(100), std::ref(model));
  }

  /// One decode step.
  void step(const Forward& forward) {
    backend->clear();
    Batch batch;
    batch.add(session, 5);
    impl->step(batch, forward);
  }
  /// A decode step that does `layer_0`, then what it has to.
  void step_with(const std::function<void(ForwardPass&, LayerArrays&)>& layer_0) {
    step([&](ForwardPass& pass) {
      model.begin(pass);
      layer_0(pass, *model.inputs(pass, 0));
      const auto arrays = model.inputs(pass, 1);
      pass.attention(1, arrays->in, model.out(pass, 1));
    });
  }

  std::shared_ptr<RuntimeImpl> impl;
  std::shared_ptr<RecordingBackend> backend;
  TableModel model;
  Session session;
};

}  // namespace echo::runtime_test
