#pragma once
// A world whose score sifts, with keys, queries and what is predicted of them; the fixture of tests that use it.

#include "cuda_score_sift_world.hpp"

namespace echo::cuda_test {

class CudaScoreSift : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && !can_score_128()) {
      GTEST_SKIP() << "no kernel that sifts for this device in this build";
    }
  }
};

inline ShapeView sift_shape(std::int32_t heads, std::int32_t top_k) {
  ShapeView shape = shape_128(heads);
  shape.row_format = RowFormat::raw;
  shape.top_k = top_k;
  return shape;
}

struct Predictions {
  std::vector<float> thresholds;
  std::vector<float> deviations;
};

/// What may be predicted of each entry: the score of the last row's best-but-so-many, in top-k, and such a deviation
/// that it lists 1.7 k.
inline Predictions predictions_of(const SiftWorld& world, float of_k) {
  Predictions made;
  const std::int32_t k = world.shape.top_k;
  for (std::int32_t entry = 0; entry < world.sizes.batch; ++entry) {
    const std::int32_t row = (entry + 1) * world.sizes.query_rows - 1;
    const std::int32_t length = world.positions[static_cast<std::size_t>(row)] + 1;
    const auto score_of = [&](float rank) {
      const auto place = static_cast<std::int32_t>(rank * static_cast<float>(k));
      return kth_of(world.scores_of(row), std::min(place, length));
    };
    made.thresholds.push_back(length > k ? score_of(of_k) : NAN);
    made.deviations.push_back(length > k ? (made.thresholds.back() - score_of(1.7F)) / kMargin : NAN);
  }
  return made;
}

/// A world with random keys, and queries.
struct SiftStage {
  SiftStage(const ShapeView& shape, const Sizes& sizes, unsigned seed)
      : backend(make_cuda_backend(0, own_kernels())),
        world(*backend, shape, sizes),
        inputs(random_inputs(world, seed)),
        queries(*backend, inputs.queries),
        weights(*backend, inputs.weights),
        engine(seed) {
    auto keys = world.index_keys.read();
    const auto block_bytes = static_cast<std::size_t>(world.index_block_bytes());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint32_t code = engine() % 256;
      keys[i] = static_cast<std::byte>(code % 128 == 127 ? 0U : code);
      if (i % block_bytes >= 64 * kDim) {  // scales of 2^-7
        keys[i] = static_cast<std::byte>(i % 4 == 3 ? 0x3C : 0);
      }
    }
    world.index_keys.write(keys);
  }

  void sift(float cap, const float* new_keys = nullptr) { world.sift(queries.data(), weights.data(), cap, new_keys); }
  /// Scores of the same without sifting.
  std::vector<float> plain_scores() {
    poison_scores();
    backend->score(params_of(world, world.all_rows(), queries.data(), DType::f32, weights.data()));
    world.plain_scores = world.scores.read();
    return world.plain_scores;
  }
  void poison_scores() { world.scores.write(filled(world.scores.size(), std::numeric_limits<float>::infinity())); }

  Predictions predictions(float of_k = 1.0F) const { return predictions_of(world, of_k); }
  void predict(const Predictions& made) { world.predict(made.thresholds, made.deviations); }

  std::unique_ptr<Backend> backend;
  SiftWorld world;
  Inputs inputs;
  DeviceArray<float> queries;
  DeviceArray<float> weights;
  std::mt19937 engine;
};

/// Positions of the rows of a pass, the last ones of sessions of such lengths.
inline std::vector<std::int32_t> rows_behind(const std::vector<std::int32_t>& lengths, std::int32_t query_rows) {
  std::vector<std::int32_t> positions;
  for (const std::int32_t length : lengths) {
    for (std::int32_t row = 0; row < query_rows; ++row) {
      positions.push_back(length == kNone ? kNone : length - query_rows + row);
    }
  }
  return positions;
}

/// The scores are these, bit for bit.
inline void expect_scores(const SiftWorld& world, const std::vector<float>& expected) {
  EXPECT_EQ(std::memcmp(world.scores.read().data(), expected.data(), expected.size() * sizeof(float)), 0);
}

/// Positions of the k best, ascending; of equal ones the first.
inline std::vector<std::int32_t> best_of(const std::vector<float>& scores, std::int32_t k) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater{},
                           [&](std::int32_t at) { return ordered_key(scores[static_cast<std::size_t>(at)]); });
  order.resize(static_cast<std::size_t>(k));
  std::ranges::sort(order);
  return order;
}

}  // namespace echo::cuda_test
