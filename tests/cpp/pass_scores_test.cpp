// Scores in a pass: which ones a recall is given, which are sifted and when select gets what was, who may read them.

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "echo/errors.hpp"
#include "pass_world.hpp"

namespace echo::runtime_test {
namespace {

TEST_F(Pass, ScoresGoWithTheSelectionThatWasMadeFromThem) {
  for (const RecallParams& recall : backend->recalls) {  // all blocks of the prefill
    EXPECT_NE(recall.scores, nullptr);
    EXPECT_NE(recall.kth_score, nullptr);
  }
  std::vector<std::int32_t> own(8, kNone);
  step_with([&](ForwardPass& pass, LayerArrays& arrays) {
    const RowBlock block = pass.blocks().front();
    const Array given(own.data(), DType::i32, {1, 8});
    pass.append(0, arrays.in.kv, arrays.in.index_key);
    pass.recall(0, block, given);  // nothing is scored
    pass.score(0, arrays.in.index_q, arrays.in.index_weights, block);
    pass.recall(0, block, given);  // nor selected
    const Array selection = pass.select(0, block);
    pass.recall(0, block);
    pass.recall(0, block, given);
    pass.recall(0, block, selection);  // the same as giving none
    pass.score(0, arrays.in.index_q, arrays.in.index_weights, block);
    pass.recall(0, block);  // the last selection is of another score
  });
  std::vector<bool> scored;
  for (const RecallParams& recall : backend->recalls) {
    EXPECT_EQ(recall.scores == nullptr, recall.kth_score == nullptr);
    scored.push_back(recall.scores != nullptr);
  }
  EXPECT_EQ(scored, (std::vector<bool>{false, false, true, false, true, false, true}));
}

TEST_F(Pass, ADecodeStepSiftsAndAPrefillDoesNot) {
  for (const ScoreParams& score : backend->scores) {  // the prefill
    EXPECT_EQ(score.sift.rows, nullptr);
  }
  for (const SelectParams& select : backend->selects) {
    EXPECT_EQ(select.sift.rows, nullptr);
  }
  EXPECT_EQ(backend->begins[0].sift_rows, nullptr);
  EXPECT_EQ(backend->begins[0].prefetched, nullptr);
  step(std::ref(model));
  ASSERT_EQ(backend->scores.size(), 2U);
  const SiftView& first = backend->scores[0].sift;
  const SiftView& second = backend->scores[1].sift;
  EXPECT_EQ(first.rows, backend->begins[0].sift_rows);
  EXPECT_EQ(first.prefetched, backend->begins[0].prefetched);
  ASSERT_NE(first.rows, nullptr);
  EXPECT_EQ(std::abs(first.rows - first.next_rows), small_config().max_batch);
  EXPECT_EQ(std::abs(first.prefetched - first.next_prefetched), 1);
  // A call finds what the one before it zeroed, and zeroes what that one used.
  EXPECT_EQ(second.rows, first.next_rows);
  EXPECT_EQ(second.next_rows, first.rows);
  EXPECT_EQ(second.prefetched, first.next_prefetched);
  EXPECT_EQ(second.next_prefetched, first.prefetched);
  EXPECT_EQ(second.thresholds, first.thresholds + 1);
  EXPECT_EQ(second.deviations, first.deviations + 1);
  EXPECT_EQ(first.predicted_stride, 2);
  EXPECT_EQ(first.capacity, 1024);
  EXPECT_FLOAT_EQ(first.prefetch_cap, 0.0012F);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(backend->selects[layer].sift.rows, backend->scores[layer].sift.rows);
    EXPECT_EQ(backend->selects[layer].sift.tokens, backend->scores[layer].sift.tokens);
    EXPECT_NE(backend->selects[layer].counters, nullptr);
  }
}

TEST_F(Pass, SelectGetsNoListThatMayBeStale) {
  std::vector<bool> sifted;
  const auto note = [&] {
    for (const SelectParams& select : backend->selects) {
      sifted.push_back(select.sift.rows != nullptr);
    }
  };
  step_with([&](ForwardPass& pass, LayerArrays& arrays) {
    const RowBlock block = pass.blocks().front();
    const auto score = [&] { pass.score(0, arrays.in.index_q, arrays.in.index_weights, block); };
    pass.append(0, arrays.in.kv, arrays.in.index_key);
    score();
    pass.select(0, block);
    static_cast<void>(pass.scores(block));  // whoever has the array may write to it
    pass.select(0, block);
    score();
    pass.select(0, block);
    backend->before_score = [] { throw InvalidArgument("a backend's mishap"); };
    EXPECT_THROW(score(), InvalidArgument);
    backend->before_score = {};
    pass.select(0, block);  // of scores that may be half overwritten
    score();
    EXPECT_EQ(backend->scores.back().sift.rows, nullptr);  // the mishap may have left anything
    pass.select(0, block);
    pass.recall(0, block);
  });
  note();
  EXPECT_EQ(sifted, (std::vector<bool>{true, false, true, false, false, false}));  // the last: of layer 1
  sifted.clear();
  step(std::ref(model));
  note();
  EXPECT_EQ(sifted, (std::vector<bool>{true, true})) << "the next pass begins anew";
  sifted.clear();
  backend->sifting = false;
  step(std::ref(model));
  note();
  EXPECT_EQ(sifted, (std::vector<bool>{false, false}));
  EXPECT_EQ(backend->begins[0].sift_rows, nullptr);
}

TEST_F(Pass, ScoresThatWereWrittenToAreWhatIsSelectedFrom) {
  step_with([&](ForwardPass& pass, LayerArrays& arrays) {
    const RowBlock block = pass.blocks().front();
    pass.append(0, arrays.in.kv, arrays.in.index_key);
    pass.score(0, arrays.in.index_q, arrays.in.index_weights, block);
    auto* scores = static_cast<float*>(pass.scores(block).data);
    for (int position = 0; position < 101; ++position) {
      scores[position] = static_cast<float>(position);
    }
    const auto* selection = pass.select(0, block).as<const std::int32_t>();
    EXPECT_EQ(selection[0], 93);
    EXPECT_EQ(selection[7], 100);
    pass.recall(0, block);
  });
}

TEST_F(Pass, WithoutPrefetchNothingIsSifted) {
  RuntimeConfig config = small_config();
  config.prefetch = "off";
  impl = std::make_shared<RuntimeImpl>(small_shape(), config);
  backend = std::make_shared<RecordingBackend>(RuntimeTestAccess::backend(*impl));
  RuntimeTestAccess::use_backend(*impl, backend);
  session = impl->open_session(200);
  impl->prefill(session, some_tokens(100), std::ref(model));
  step(std::ref(model));
  EXPECT_EQ(backend->scores[0].sift.rows, nullptr);
  EXPECT_EQ(backend->selects[0].sift.rows, nullptr);
  EXPECT_EQ(backend->begins[0].sift_rows, nullptr);
  EXPECT_THROW(static_cast<void>(impl->plan().bytes_of("sift_rows")), InvalidArgument);
}

TEST_F(Pass, ScoresCanBeReadUntilTheNextScore) {
  step_with([&](ForwardPass& pass, LayerArrays& arrays) {
    const RowBlock block = pass.blocks().front();
    EXPECT_THROW(pass.scores(block), StateError);
    EXPECT_THROW(pass.scores({.first = 0, .count = 2}), InvalidArgument);
    pass.attention(0, arrays.in, model.out(pass, 0));
    const Array scores = pass.scores(block);
    EXPECT_EQ(to_string(scores), "f32[1, 256]");
    const auto* selected = pass.selection().as<const std::int32_t>();
    // No token that was left out has a better score than one that was selected.
    float worst = std::numeric_limits<float>::infinity();
    float best_left = -worst;
    for (std::int32_t position = 0, j = 0; position <= 100; ++position) {
      const bool in = j < 8 && selected[j] == position;
      const float score = scores.as<const float>()[position];
      j += in ? 1 : 0;
      worst = in ? std::min(worst, score) : worst;
      best_left = in ? best_left : std::max(best_left, score);
    }
    EXPECT_GE(worst, best_left);
  });
  // Of several blocks, the last that was scored.
  Session twin = impl->open_session(200);
  impl->prefill(twin, some_tokens(100), [&](ForwardPass& pass) {
    model(pass);
    ASSERT_GT(pass.blocks().size(), 2U);
    EXPECT_EQ(pass.scores(pass.blocks().back()).shape[0], pass.blocks().back().count);
    EXPECT_THROW(pass.scores(pass.blocks().front()), StateError);
  });
}

}  // namespace
}  // namespace echo::runtime_test
