#include "echo/stats.hpp"

namespace echo {

std::int64_t RuntimeStats::recalled_bytes() const {
  std::int64_t bytes = 0;
  for (const LayerStats& layer : layers) {
    bytes += layer.recalled_bytes;
  }
  return bytes;
}

std::int64_t RuntimeStats::prefetched_bytes() const {
  std::int64_t bytes = 0;
  for (const LayerStats& layer : layers) {
    bytes += layer.prefetched_bytes;
  }
  return bytes;
}

std::int64_t RuntimeStats::forecast_bytes() const {
  std::int64_t bytes = 0;
  for (const LayerStats& layer : layers) {
    bytes += layer.forecast_bytes;
  }
  return bytes;
}

double RuntimeStats::hit_rate() const {
  std::int64_t hits = 0;
  std::int64_t misses = 0;
  for (const LayerStats& layer : layers) {
    hits += layer.hits;
    misses += layer.misses;
  }
  return hits + misses == 0 ? 1.0 : static_cast<double>(hits) / static_cast<double>(hits + misses);
}

}  // namespace echo
