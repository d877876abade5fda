#pragma once
// Rows of scores with what score may have sifted from them, in the memory of any backend, and what select makes of
// them.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "cuda_arrays.hpp"
#include "cuda_shapes.hpp"
#include "kernels/number_formats.hpp"
#include "kernels/params.hpp"
#include "runtime/backend.hpp"

namespace echo::cuda_test {

/// Score distributions that break selections: name by number.
inline constexpr int kScoreKinds = 18;
inline float score_of(int kind, std::int32_t position, std::int32_t length, std::mt19937& engine) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case 0:
      return normal(engine);
    case 1:
      return engine() % 10 == 0 ? std::abs(normal(engine)) : 0.0F;  // mostly zeros
    case 2:
      return 1.0F + 0.245F * static_cast<float>(engine() % 4096) / 4096.0F;  // one coarse bin
    case 3:
      return std::bit_cast<float>(static_cast<std::uint32_t>(engine()));  // anything, NaN and inf too
    case 4:
      return engine() % 2 == 0 ? 0.0F : -0.0F;
    case 5:
      return static_cast<float>(static_cast<int>(engine() % 5) - 2);  // ties
    case 6:
      return 1e6F * normal(engine);
    case 7:
      return std::bit_cast<float>(static_cast<std::uint32_t>(0x3F800000U + engine() % 3U));  // neighbouring floats
    case 8:
      return std::numeric_limits<float>::quiet_NaN();
    case 9:
      return static_cast<float>(position);
    case 10:
      return static_cast<float>(-position);
    case 11:
      return -std::numeric_limits<float>::infinity();
    case 12:
      return engine() % 64 == 0 ? 1.0F : 0.0F;  // fewer ones than k, or hardly more
    case 13:
      return normal(engine) + (position > length - 2100 ? 10.0F : 0.0F);  // the newest tokens
    case 14:
      return normal(engine) + (position % 64 < 2 ? 5.0F : 0.0F);  // a period
    case 15:  // a few in the bin of the largest keys, far above ties that reach a bound
    case 16: {
      const float most = kind == 15 ? std::numeric_limits<float>::infinity() : 3e38F;
      return engine() % 410 == 0 ? most : (engine() % 8 == 0 ? (kind == 15 ? 1.0F : 0.96F) : 0.5F);
    }
    default:
      return engine() % 3 == 0 ? normal(engine) : std::numeric_limits<float>::infinity();
  }
}

struct SelectSizes {
  std::int32_t rows = 1;
  std::int32_t table_stride = 4;  ///< blocks of a session
  std::int32_t query_rows = 1;
  std::int32_t capacity = 8192;  ///< of a list
  std::int64_t score_stride() const { return static_cast<std::int64_t>(table_stride) * kTokensPerBlock; }
};

/// Scores of some rows; behind a row's own position lies what must not be looked at.
struct ScoredRows {
  ScoredRows(const SelectSizes& sizes, std::vector<std::int32_t> positions_, int kind, unsigned seed)
      : positions(std::move(positions_)),
        stride(sizes.score_stride()),
        scores(static_cast<std::size_t>(sizes.rows * stride), std::numeric_limits<float>::infinity()) {
    std::mt19937 engine(seed);
    for (std::size_t row = 0; row < positions.size(); ++row) {
      const std::span<float> own = tokens(row);
      for (std::size_t i = 0; i < own.size(); ++i) {
        own[i] = score_of(kind, static_cast<std::int32_t>(i), static_cast<std::int32_t>(own.size()), engine);
      }
    }
  }

  std::span<float> tokens(std::size_t row) {
    return {scores.data() + static_cast<std::ptrdiff_t>(row) * stride, static_cast<std::size_t>(positions[row] + 1)};
  }

  std::vector<std::int32_t> positions;
  std::int64_t stride;
  std::vector<float> scores;
};

/// What score leaves: for each row a list of `wanted(row)` tokens, more where the last ones tie, in random order.
struct Sifting {
  Sifting(ScoredRows& rows, const SelectSizes& sizes, unsigned seed, const std::function<std::int32_t(int)>& wanted)
      : found(rows.positions.size()),
        tokens(found.size() * static_cast<std::size_t>(sizes.capacity), ScoredToken{0xFFFFFFFFU, -1}) {
    std::mt19937 engine(seed);
    for (std::size_t row = 0; row < found.size(); ++row) {
      std::vector<ScoredToken> all;
      for (const float score : rows.tokens(row)) {
        all.push_back({ordered_key(score), static_cast<std::int32_t>(all.size())});
      }
      found[row].compared = static_cast<std::int32_t>(all.size());
      const auto count = static_cast<std::size_t>(wanted(static_cast<int>(row)));
      if (count == 0 || count > all.size()) {
        continue;
      }
      std::ranges::sort(all, std::greater{}, &ScoredToken::key);
      const std::uint32_t bound = all[count - 1].key;
      if (bound == 0) {  // of NaN: no score is a bound
        continue;
      }
      std::erase_if(all, [&](const ScoredToken& token) { return token.key < bound; });
      std::ranges::shuffle(all, engine);
      found[row].candidates = bound;
      found[row].found = static_cast<std::int32_t>(all.size());
      all.resize(std::min(all.size(), static_cast<std::size_t>(sizes.capacity)));
      std::ranges::copy(all, tokens.begin() + static_cast<std::ptrdiff_t>(row) * sizes.capacity);
    }
  }

  std::vector<RowSift> found;
  std::vector<ScoredToken> tokens;
};

/// Select in a backend's memory.
class SelectWorld {
 public:
  SelectWorld(Backend& backend_, std::int32_t top_k, const SelectSizes& sizes_)
      : backend(backend_),
        shape(shape_of(RowFormat::fp32, IndexKeyFormat::fp8, top_k)),
        sizes(sizes_),
        positions(backend, std::vector<std::int32_t>(static_cast<std::size_t>(sizes.rows))),
        scores(backend, std::vector<float>(static_cast<std::size_t>(sizes.rows * sizes.score_stride()))),
        selection(backend, std::vector<std::int32_t>(static_cast<std::size_t>(sizes.rows * top_k))),
        kth_score(backend, std::vector<float>(static_cast<std::size_t>(sizes.rows))),
        sift_rows(backend, std::vector<RowSift>(static_cast<std::size_t>(sizes.rows))),
        sift_tokens(backend, std::vector<ScoredToken>(static_cast<std::size_t>(sizes.rows * sizes.capacity))),
        counters(backend, std::vector<LayerCounters>(1)) {
    backend.prepare({.shape = shape,
                     .layers = 1,
                     .rows = sizes.rows,
                     .block_rows = sizes.rows,
                     .slots = 64,
                     .host_rows = 64,
                     .splits = 1});
  }

  void write(const ScoredRows& rows) {
    positions.write(rows.positions);
    scores.write(rows.scores);
    sifted_ = false;
  }
  void write(const Sifting& sifting) {
    sift_rows.write(sifting.found);
    sift_tokens.write(sifting.tokens);
    sifted_ = true;
  }

  SelectParams params() {
    SelectParams p{};
    p.step.positions = positions.data();
    p.step.rows = sizes.rows;
    p.step.query_rows = sizes.query_rows;
    p.step.table_stride = sizes.table_stride;
    p.block = {.first = 0, .count = sizes.rows, .tick_offset = 0};
    p.shape = shape;
    p.scores = scores.data();
    p.score_stride = sizes.score_stride();
    p.selection = selection.data();
    p.kth_score = kth_score.data();
    p.counters = counters.data();
    if (sifted_) {
      p.sift.rows = sift_rows.data();
      p.sift.tokens = sift_tokens.data();
      p.sift.capacity = sizes.capacity;
    }
    return p;
  }

  /// Selects into memory that holds something else.
  void select() {
    selection.write(std::vector<std::int32_t>(selection.size(), 1 << 30));
    kth_score.write(std::vector<float>(kth_score.size(), -7.0F));
    counters.write(std::vector<LayerCounters>(1));
    backend.select(params());
  }

  std::vector<std::uint32_t> kth_bits() const {
    std::vector<std::uint32_t> bits;
    for (const float score : kth_score.read()) {
      bits.push_back(std::bit_cast<std::uint32_t>(score));
    }
    return bits;
  }

  Backend& backend;
  ShapeView shape;
  SelectSizes sizes;
  DeviceArray<std::int32_t> positions;
  DeviceArray<float> scores;
  DeviceArray<std::int32_t> selection;
  DeviceArray<float> kth_score;
  DeviceArray<RowSift> sift_rows;
  DeviceArray<ScoredToken> sift_tokens;
  DeviceArray<LayerCounters> counters;

 private:
  bool sifted_ = false;
};

}  // namespace echo::cuda_test
