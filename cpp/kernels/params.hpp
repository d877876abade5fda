#pragma once
// What the runtime hands to a backend for each verb: plain structs of pointers and sizes (device memory unless
// said otherwise), passed by value to kernels. One struct per verb.

#include <cstddef>
#include <cstdint>
#include <span>

#include "cache_manager/layer_view.hpp"
#include "echo/array.hpp"
#include "echo/model_shape.hpp"

namespace echo {

/// A host block of a session: block_table[entry, index]. Entries of `owners` are hints that may be out of date or
/// unset: whoever uses one checks that block_table[entry, index] is the block.
struct alignas(8) BlockOwner {
  std::int32_t entry;  ///< of the batch
  std::int32_t index;
};

/// The control block of a pass, as it lies on the device. Pointers stay the same from pass to pass, so a captured
/// graph reads the new contents.
struct StepView {
  /// [1] tick of the pass's first row block; block b uses tick + b. The last block's tick + 1 is the stamp of new rows:
  /// the next pass begins behind it.
  const std::int32_t* tick;
  const std::int32_t* tokens;       ///< [rows]
  const std::int32_t* positions;    ///< [rows] position of the row's token, kNone = padding row
  const std::int32_t* session;      ///< [rows] index of the row's session in per-session state, kNone = padding
  const std::int32_t* block_table;  ///< [batch, table_stride] host blocks of each batch entry
  std::int32_t rows;                ///< batch x query_rows, padding included
  std::int32_t query_rows;          ///< row r belongs to batch entry r / query_rows
  std::int32_t table_stride;
  BlockOwner* owners;  ///< [host blocks] which batch entry holds a host block; see begin
};

/// Rows [first, first + count) of the pass, worked on with tick `*step.tick + tick_offset`.
struct BlockView {
  std::int32_t first;
  std::int32_t count;
  std::int32_t tick_offset;
};

/// Sizes of the model that kernels need.
struct ShapeView {
  std::int32_t index_heads;
  std::int32_t index_dim;
  std::int32_t query_heads;
  std::int32_t latent_dim;
  std::int32_t rope_dim;
  std::int32_t top_k;
  RowFormat row_format;
  IndexKeyFormat index_key_format;
};

inline ShapeView shape_view(const ModelShape& shape) {
  return {.index_heads = shape.index_heads,
          .index_dim = shape.index_dim,
          .query_heads = shape.query_heads,
          .latent_dim = shape.latent_dim,
          .rope_dim = shape.rope_dim,
          .top_k = shape.top_k,
          .row_format = shape.row_format,
          .index_key_format = shape.index_key_format};
}

/// What score finds out about a query row on the way. Keys are ordered keys of scores (number_formats.hpp).
struct alignas(16) RowSift {
  std::int32_t found;        ///< candidates; only the first `capacity` of them are listed
  std::int32_t compared;     ///< scores that were compared with the bounds, if no block of the table was bad
  std::uint32_t candidates;  ///< key of the bound of candidates; 0: none, nothing is compared
  std::uint32_t prefetch;    ///< key of the bound of prefetch, at least as high
};

/// A token whose key is at or above the bound of candidates.
struct alignas(8) ScoredToken {
  std::uint32_t key;
  std::int32_t position;
};

/// Sifting: while it scores, score lists the tokens that may be selected, for select, and fetches those that probably
/// will be, for recall. All of it is a guess that decides nothing but speed. Device memory that layers use in turns.
struct SiftView {
  RowSift* rows;        ///< [block.count] of this call, zero before it; null: no sifting (prefill)
  RowSift* next_rows;   ///< [block.count] of the pass's next call: this call zeroes them (begin those of the first)
  ScoredToken* tokens;  ///< [block.count, capacity] candidates, in any order
  std::int32_t capacity;
  /// [max_sessions, predicted_stride] of k-th scores, by session (prediction.hpp); both point to this layer's.
  const float* thresholds;
  const float* deviations;
  std::int64_t predicted_stride;  ///< layers of the model
  std::int32_t* prefetched;       ///< [1] rows prefetched by this call, zero before it
  std::int32_t* next_prefetched;  ///< [1] zeroed like next_rows
  float prefetch_cap;             ///< rows per scored token that may be prefetched; 0: none
};

/// begin, once per pass and before its verbs: owners[block] for the blocks that hold the tokens of each batch entry, up
/// to its last row's position. Of entries that share a block any may be named. And zeroes what the first score of the
/// pass sifts into. In each of `layers`, host rows of the pass's new tokens get slots (a row that has one keeps it),
/// which nothing takes from them in this pass. They are written by the layer's append or recall.
struct BeginParams {
  StepView step;
  std::int64_t host_blocks;
  std::span<const LayerView> layers = {};  ///< in host memory; none in a prefill, whose rows get no slots
  RowSift* sift_rows = nullptr;            ///< [step.rows], or null
  std::int32_t* prefetched = nullptr;      ///< one word, or null
};

/// append: for each row that is no padding, encodes kv and writes it to its host row and, if that has a slot, there
/// too; encodes index_key into its place in the index cache. kv_dtype u8 means rows are encoded already. kv or
/// index_key may be null: nothing is done for it.
struct AppendParams {
  LayerView layer;
  StepView step;
  ShapeView shape;
  const void* kv;  ///< [rows, latent + rope] f32/bf16, or [rows, row_bytes] u8
  DType kv_dtype;
  const void* index_key;  ///< [rows, index_dim] f32/bf16, or null
  DType index_key_dtype;
};

/// score: scores[i, s] for rows i of the block and positions s in [0, positions[row]]; what lies behind is
/// left undefined. Padding rows get nothing. With `sift`, also lists candidates and prefetches rows that are not
/// resident: those that the pass appends excepted (they have slots, or begin reported that there were none). With
/// `index_key`, first appends the keys of the pass's rows, as append would.
struct ScoreParams {
  LayerView layer;
  StepView step;
  BlockView block;
  ShapeView shape;
  const void* index_q;  ///< [rows, index_heads, index_dim] f32/bf16, of the whole pass
  DType index_q_dtype;
  const float* index_weights;  ///< [rows, index_heads], of the whole pass
  float* scores;               ///< [block.count, score_stride]
  std::int64_t score_stride;
  SiftView sift = {};
  const void* index_key = nullptr;  ///< [rows, index_dim] f32/bf16, or null; a block that has all rows of the pass
  DType index_key_dtype = DType::f32;
};

/// What score has to append before it scores.
inline AppendParams keys_of(const ScoreParams& params) {
  return {.layer = params.layer,
          .step = params.step,
          .shape = params.shape,
          .kv = nullptr,
          .kv_dtype = DType::f32,
          .index_key = params.index_key,
          .index_key_dtype = params.index_key_dtype};
}

/// select: the exact top_k positions of each row of the block, ascending, then kNone; padding rows all kNone.
/// kth_score[row] = the top_k-th score, left alone where the row has fewer than top_k tokens.
struct SelectParams {
  StepView step;
  BlockView block;
  ShapeView shape;
  const float* scores;  ///< [block.count, score_stride]
  std::int64_t score_stride;
  std::int32_t* selection;            ///< [rows, top_k], of the whole pass
  float* kth_score;                   ///< [rows], of the whole pass
  SiftView sift = {};                 ///< what score left; `rows` null: nothing
  LayerCounters* counters = nullptr;  ///< of the layer
};

/// recall: slots[i, j] = slot of selection[i, j] after making it resident, kNone where the selection is kNone.
/// No slot that this call uses is given away, and a host row is fetched once however often it is selected.
/// With `kv`, it also does what append does for the rows of the pass (the block is the whole pass then), apart from
/// index keys: one launch instead of two. Those rows have slots since begin, or nobody selects them. `scores` and
/// `kth_score` are those of the block's select; null where the selection comes from elsewhere. They only decide which
/// rows are evicted.
struct RecallParams {
  LayerView layer;
  StepView step;
  BlockView block;
  ShapeView shape;
  const std::int32_t* selection;  ///< [block.count, top_k]
  std::int32_t* slots;            ///< [block.count, top_k]
  const float* scores;            ///< [block.count, score_stride], or null
  std::int64_t score_stride;
  const float* kth_score;  ///< [rows], of the whole pass, or null
  const void* kv;          ///< as in AppendParams, or null
  DType kv_dtype;
};

/// Tokens that a forecast looks at, the best of those that were not selected: in multiples of top_k.
inline constexpr float kForecastReach = 0.5F;

ECHO_HOST_DEVICE std::int32_t forecast_reach(std::int32_t top_k) {
  return static_cast<std::int32_t>(kForecastReach * static_cast<float>(top_k));
}

/// forecast: what just missed the selection is likely to be in the next one. Of each batch entry's last row in the
/// block, the best rows that are not resident are fetched into slots of rows that are farther from being selected;
/// those that the pass appends excepted. It follows the recall of the block, whose scores these are, and may go on
/// beside later verbs until the pass is committed, but not beside others that use the same layer's rows. Which rows are
/// fetched decides nothing but what later recalls find.
struct ForecastParams {
  LayerView layer;
  StepView step;
  BlockView block;
  ShapeView shape;
  std::int32_t index;   ///< of the layer
  const float* scores;  ///< [block.count, score_stride]
  std::int64_t score_stride;
  const float* kth_score;  ///< [rows], of the whole pass
  std::int32_t cap;        ///< rows for each batch entry, at most
};

/// attend: out[row, h, :] = softmax over the block's slots (kNone skipped, unread); 0 where there are none.
struct AttendParams {
  LayerView layer;
  BlockView block;
  ShapeView shape;
  const void* q;  ///< [rows, query_heads, latent + rope] f32/bf16, of the whole pass
  DType q_dtype;
  float scale;
  const std::int32_t* slots;  ///< [block.count, top_k]
  void* out;                  ///< [rows, query_heads, latent] f32/bf16, of the whole pass
  DType out_dtype;
  std::int32_t splits;  ///< parts of the selection that are reduced apart, then combined in order
};

/// commit: folds the k-th scores of a pass, rows in order, into what is predicted (`observe` in prediction.hpp). Leaves
/// every kth_score NaN.
struct CommitParams {
  StepView step;
  std::int32_t layers;
  float* kth_score;  ///< [layers, kth_stride]
  std::int64_t kth_stride;
  float* thresholds;  ///< [max_sessions, layers]
  float* deviations;  ///< [max_sessions, layers]
  float alpha;
};

/// Consecutive host rows.
struct RowRun {
  std::int32_t first;
  std::int32_t count;
};

}  // namespace echo
