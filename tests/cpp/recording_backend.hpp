#pragma once
// A backend that remembers what it was asked, and leaves the work to another.

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/backend.hpp"

namespace echo::runtime_test {

class RecordingBackend final : public Backend {
 public:
  explicit RecordingBackend(std::shared_ptr<Backend> inner) : inner_(std::move(inner)) {}

  const std::string& device() const override { return inner_->device(); }
  MemoryResource& host_memory() override { return inner_->host_memory(); }
  MemoryResource& device_memory() override { return inner_->device_memory(); }
  bool sifts() const override { return sifting && inner_->sifts(); }
  bool forecasts() const override { return inner_->forecasts(); }
  std::size_t row_alignment() const override { return alignment; }
  std::size_t score_alignment() const override { return alignment; }
  std::size_t attend_alignment() const override { return alignment; }
  void use_stream(std::uintptr_t stream) override { inner_->use_stream(stream); }
  void copy_to_device(void* to, const void* from, std::size_t bytes) override {
    inner_->copy_to_device(to, from, bytes);
  }
  void copy_to_host(void* to, const void* from, std::size_t bytes) override { inner_->copy_to_host(to, from, bytes); }
  void fill(void* to, int byte, std::size_t bytes) override { inner_->fill(to, byte, bytes); }
  void upload_control(void* to, const void* from, std::size_t bytes) override {
    inner_->upload_control(to, from, bytes);
  }
  void begin(const BeginParams& params) override {
    begins.push_back(params);
    inner_->begin(params);
  }
  void append(const AppendParams& params) override {
    appends.push_back(params);
    inner_->append(params);
  }
  void score(const ScoreParams& params) override {
    scores.push_back(params);
    if (before_score) {
      before_score();
    }
    inner_->score(params);
  }
  void select(const SelectParams& params) override {
    selects.push_back(params);
    inner_->select(params);
  }
  void recall(const RecallParams& params) override {
    recalls.push_back(params);
    if (before_recall) {
      before_recall();
    }
    inner_->recall(params);
  }
  void forecast(const ForecastParams& params) override {
    forecasts_made.push_back(params);
    inner_->forecast(params);
  }
  void attend(const AttendParams& params) override { inner_->attend(params); }
  void commit(const CommitParams& params) override { inner_->commit(params); }
  void release(std::span<const LayerView> layers, std::span<const RowRun> rows) override {
    inner_->release(layers, rows);
  }
  void synchronize() override { inner_->synchronize(); }
  std::function<void()> capture(const std::function<void()>& body) override { return inner_->capture(body); }

  void clear() {
    begins.clear();
    appends.clear();
    scores.clear();
    selects.clear();
    recalls.clear();
    forecasts_made.clear();
  }

  std::vector<BeginParams> begins;
  std::vector<AppendParams> appends;
  std::vector<ScoreParams> scores;
  std::vector<SelectParams> selects;
  std::vector<RecallParams> recalls;
  std::vector<ForecastParams> forecasts_made;
  bool sifting = true;
  std::size_t alignment = 1;  // of all that may have to be aligned
  std::function<void()> before_score;
  std::function<void()> before_recall;

 private:
  std::shared_ptr<Backend> inner_;
};

}  // namespace echo::runtime_test
