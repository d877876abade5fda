#pragma once
// A world whose score sifts and prefetches: two sets of what it leaves, used in turns, and what must be true of them.

#include <map>
#include <set>

#include "cuda_score_128_world.hpp"
#include "kernels/cuda_check.hpp"
#include "kernels/kernel_errors.hpp"
#include "kernels/prediction.hpp"
#include "kernels/score_sm90.hpp"

namespace echo::cuda_test {

struct SiftWorld : World {
  static constexpr std::int32_t kCapacityOfK = 3;  ///< candidates that a row has room for, in top_k

  SiftWorld(Backend& backend_, const ShapeView& shape_, const Sizes& sizes_)
      : World(backend_, shape_, sizes_),
        sifts(backend_, std::vector<RowSift>(2 * static_cast<std::size_t>(sizes.rows()), poisoned())),
        tokens(backend_, std::vector<ScoredToken>(static_cast<std::size_t>(sizes.rows() * capacity()), {0, kNone})),
        predicted(backend_, std::vector<float>(2 * static_cast<std::size_t>(sizes.batch), NAN)),
        spreads(backend_, std::vector<float>(2 * static_cast<std::size_t>(sizes.batch), NAN)),
        prefetched(backend_, {77, 77}),
        queue(backend_, std::vector<PrefetchQueue>(1)) {
    for (std::size_t i = 0; i + 8 <= slab.bytes(); i += 8) {
      const std::uint64_t word = (i + 1) * 0x9E3779B97F4A7C15ULL;
      std::memcpy(slab.data() + i, &word, sizeof word);
    }
    auto queues = queue.read();
    queues[0].call = kLastCall - 5;  // so that it soon counts from 0 again
    queue.write(queues);
  }

  std::int32_t capacity() const { return kCapacityOfK * shape.top_k; }

  /// Begins a pass; the first call of it sifts into set 0. `claims`: new rows get slots.
  void begin_sifting(std::int32_t tick, const std::vector<std::int32_t>& positions_, bool claims = false) {
    positions = positions_;
    turn = 0;
    upload(tick, positions);
    const LayerView own = layer();
    backend.begin({.step = step(),
                   .host_blocks = sizes.host_blocks(),
                   .layers = {&own, claims ? std::size_t{1} : std::size_t{0}},
                   .sift_rows = sifts.data(),
                   .prefetched = prefetched.data()});
  }
  SiftView sift_view(float cap) {
    const std::int32_t own = turn % 2;
    const std::int32_t other = 1 - own;
    return {.rows = sifts.data() + own * sizes.rows(),
            .next_rows = sifts.data() + other * sizes.rows(),
            .tokens = tokens.data(),
            .capacity = capacity(),
            .thresholds = predicted.data() + 1,  // of the second of two layers
            .deviations = spreads.data() + 1,
            .predicted_stride = 2,
            .prefetched = prefetched.data() + own,
            .next_prefetched = prefetched.data() + other,
            .prefetch_cap = cap};
  }
  /// What is predicted for each session.
  void predict(const std::vector<float>& thresholds_, const std::vector<float>& deviations_) {
    const auto spread = [](const std::vector<float>& values) {
      std::vector<float> all(2 * values.size(), 1e30F);
      for (std::size_t i = 0; i < values.size(); ++i) {
        all[2 * i + 1] = values[i];
      }
      return all;
    };
    bounds.clear();
    for (std::size_t i = 0; i < thresholds_.size(); ++i) {
      bounds.push_back(sift_bounds(thresholds_[i], deviations_[i]));
    }
    predicted.write(spread(thresholds_));
    spreads.write(spread(deviations_));
  }
  /// `new_keys`: those of the pass's rows, which the call is to write.
  void sift(const float* queries, const float* weights, float cap, const float* new_keys = nullptr) {
    auto params = params_of(*this, all_rows(), queries, DType::f32, weights);
    params.sift = sift_view(cap);
    params.index_key = new_keys;
    params.index_key_dtype = DType::f32;
    if (thread_blocks > 0) {
      backend.synchronize();  // its work is in another stream
      launch_score_sm90(params, queue.data(),
                        {.stream = nullptr, .multiprocessors = thread_blocks, .errors = errors.view()});
      ECHO_CUDA_CHECK(cudaStreamSynchronize(nullptr));
    } else {
      backend.score(params);
    }
  }
  /// Between calls.
  void expect_idle_queue() const {
    const PrefetchQueue idle = queue.read()[0];
    EXPECT_EQ(idle.listed, 0);
    EXPECT_EQ(idle.finished, 0);
    EXPECT_EQ(idle.dismissed, 0);
    EXPECT_LT(idle.call, kLastCall);
    if (idle.call == 0) {
      EXPECT_TRUE(std::ranges::all_of(idle.rows, [](const QueuedRow& entry) { return entry.tag == 0; }));
    }
  }
  /// Selects from what the last call listed.
  void select_sifted() {
    SelectParams params = select_params(all_rows());
    params.sift = sift_view(0.0F);
    params.counters = layer().counters;
    backend.select(params);
  }
  /// Behind a call: the next one has what this one zeroed.
  void take_turns() { ++turn; }

  std::vector<float> scores_of(std::int32_t row) const {
    const auto first = plain_scores.begin() + row * sizes.score_stride();
    return {first, first + positions[static_cast<std::size_t>(row)] + 1};
  }
  std::int32_t host_row_of(std::int32_t row, std::int32_t position) const {
    const auto words = control.read();
    const auto table = step().block_table - control.data();
    return echo::host_row(words.data() + table + row / sizes.query_rows * sizes.table_stride, position);
  }

  DeviceArray<RowSift> sifts;
  DeviceArray<ScoredToken> tokens;
  DeviceArray<float> predicted;
  DeviceArray<float> spreads;
  DeviceArray<std::int32_t> prefetched;
  DeviceArray<PrefetchQueue> queue;
  std::vector<std::int32_t> positions;
  std::vector<float> plain_scores;  ///< of the pass
  std::int32_t turn = 0;
  std::vector<SiftBounds> bounds;  ///< of each session
  /// That score: few of them have so much to do that there is time to prefetch. 0: as many as there are.
  std::int32_t thread_blocks = 0;
  KernelErrors errors;

 private:
  static RowSift poisoned() {
    RowSift sift;
    std::memset(&sift, 0x55, sizeof sift);
    return sift;
  }
};

/// The k-th largest score of each row.
inline float kth_of(std::vector<float> scores, std::int32_t k) {
  std::ranges::nth_element(scores, scores.begin() + (k - 1),
                           [](float a, float b) { return ordered_key(a) > ordered_key(b); });
  return scores[static_cast<std::size_t>(k - 1)];
}

/// What one row's sift must be, given its scores. Returns whether the k best are in its list.
inline bool expect_right_sift(const SiftWorld& world, std::int32_t row, const RowSift& sift,
                              const std::vector<ScoredToken>& listed) {
  SCOPED_TRACE(row);
  const auto scores = world.scores_of(row);
  const auto length = static_cast<std::int32_t>(scores.size());
  const SiftBounds& bounds = world.bounds[static_cast<std::size_t>(row / world.sizes.query_rows)];
  if (length <= world.shape.top_k || std::isnan(bounds.candidates)) {
    const RowSift zero{};
    EXPECT_EQ(std::memcmp(&sift, &zero, sizeof zero), 0);
    return false;
  }
  EXPECT_EQ(sift.candidates, ordered_key(bounds.candidates));
  EXPECT_EQ(sift.prefetch, ordered_key(bounds.prefetch));
  EXPECT_EQ(sift.compared, length);
  std::map<std::int32_t, std::uint32_t> expected;
  for (std::int32_t token = 0; token < length; ++token) {
    const std::uint32_t key = ordered_key(scores[static_cast<std::size_t>(token)]);
    if (key >= sift.candidates) {
      expected[token] = key;
    }
  }
  EXPECT_EQ(sift.found, std::ssize(expected));
  std::set<std::int32_t> seen;
  for (std::int32_t i = 0; i < std::min(sift.found, world.capacity()); ++i) {
    const ScoredToken& token = listed[static_cast<std::size_t>(row * world.capacity() + i)];
    const auto found = expected.find(token.position);
    if (found == expected.end() || found->second != token.key || !seen.insert(token.position).second) {
      ADD_FAILURE() << "candidate " << i << " of " << sift.found << ": position " << token.position;
      break;
    }
  }
  return sift.found >= world.shape.top_k && sift.found <= world.capacity();
}

/// Checks what the last call left; returns how many rows have a list that does.
inline int expect_right_sifts(const SiftWorld& world) {
  const auto sifts = world.sifts.read();
  const auto listed = world.tokens.read();
  const std::int32_t rows = world.sizes.rows();
  const RowSift zero{};
  int complete = 0;
  for (std::int32_t row = 0; row < rows; ++row) {
    const RowSift& own = sifts[static_cast<std::size_t>(world.turn % 2 * rows + row)];
    const RowSift& next = sifts[static_cast<std::size_t>((1 - world.turn % 2) * rows + row)];
    EXPECT_EQ(std::memcmp(&next, &zero, sizeof zero), 0) << "the next call's row " << row;
    if (world.positions[static_cast<std::size_t>(row)] == kNone) {
      EXPECT_EQ(std::memcmp(&own, &zero, sizeof zero), 0) << "padding row " << row;
      continue;
    }
    complete += expect_right_sift(world, row, own, listed) ? 1 : 0;
  }
  EXPECT_EQ(world.prefetched.read()[static_cast<std::size_t>(1 - world.turn % 2)], 0);
  return complete;
}

}  // namespace echo::cuda_test
