#include "kernels/forecast_branch.hpp"

#include <algorithm>

#include "cache_manager/fetch_forecast.cuh"
#include "cache_manager/find_forecast.cuh"

namespace echo {
namespace {

unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  ECHO_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

LaunchContext beside(const LaunchContext& pass, const Stream& stream) {
  return {stream.get(), pass.multiprocessors, pass.errors};
}

void wait(cudaStream_t stream, const Event& event) { ECHO_CUDA_CHECK(cudaStreamWaitEvent(stream, event.get(), 0)); }

}  // namespace

void ForecastBranch::add(const ForecastParams& params, const NearLists& near, const ForecastLists& lists,
                         const LaunchContext& pass) {
  settle(pass);
  capture_ = capture_of(pass.stream);
  recalled_.record(pass.stream);
  added_ = {.params = params, .near = near, .lists = lists};
  pools_.push_back(params.layer.pool);
}

cudaEvent_t ForecastBranch::attention_begun(const std::byte* pool) const {
  return added_ && added_->params.layer.pool == pool ? begun_.get() : nullptr;
}

void ForecastBranch::attended(const std::byte* pool, int left, bool records, const LaunchContext& pass) {
  if (added_ && added_->params.layer.pool == pool) {
    added_->begun = records;
    added_->left = std::max(left, kForecastSms);
    settle(pass);
  }
}

std::int32_t* ForecastBranch::fetching(const LaunchContext& pass) {
  return settle(pass) && fetching_ ? fetching_->ended : nullptr;
}

void ForecastBranch::join_found(const LaunchContext& pass) {
  if (settle(pass) && finding_) {
    wait(pass.stream, found_);
  }
  finding_ = false;
}

void ForecastBranch::join(const LaunchContext& pass) {
  if (settle(pass)) {
    if (fetching_) {
      passed_.record(pass.stream);
      wait(find_.get(), passed_);
      launch_end_forecast(*fetching_, beside(pass, find_));
      ended_.record(find_.get());
    }
    wait(pass.stream, ended_);
    wait(pass.stream, fetched_);
  }
  pools_.clear();
  fetching_.reset();
  finding_ = false;
}

void ForecastBranch::join_pool(const std::byte* pool, const LaunchContext& pass) {
  if (std::ranges::find(pools_, pool) != pools_.end()) {
    join(pass);
  }
}

void ForecastBranch::retire() noexcept {
  ECHO_CUDA_WARN(cudaStreamSynchronize(find_.get()));
  ECHO_CUDA_WARN(cudaStreamSynchronize(fetch_.get()));
}

bool ForecastBranch::settle(const LaunchContext& pass) {
  if (pools_.empty()) {
    return false;
  }
  if (capture_of(pass.stream) != capture_) {
    added_.reset();
    fetching_.reset();
    pools_.clear();
    finding_ = false;
    return false;
  }
  if (added_) {
    const Forecast own = *added_;
    added_.reset();
    wait(find_.get(), recalled_);
    if (own.begun) {
      wait(find_.get(), begun_);
    }
    LaunchContext finding = beside(pass, find_);
    finding.multiprocessors = own.left;
    launch_find_forecast(own.params, own.near, own.lists, finding);
    found_.record(find_.get());
    ended_.record(find_.get());
    finding_ = true;
    fetching_ = own.lists;
    wait(fetch_.get(), found_);
    launch_fetch_forecast(own.params, own.lists, beside(pass, fetch_));
    fetched_.record(fetch_.get());
  }
  return true;
}

}  // namespace echo
