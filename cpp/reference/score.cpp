// score: work is cut into (batch entry, block of 64 tokens). Each piece decodes its block of index
// keys once, into a transposed tile of floats, and scores all query rows of the entry that reach it
// (simd/score_loops.cpp). Queries are quantised once per call; their scales, powers of two, move
// into the head weights. Whole tiles are always computed and only the part up to the row's own
// position is stored: a score has the same bits wherever its token lies in the block and whichever
// rows are scored with it.
#include "reference/score.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "echo/errors.hpp"
#include "reference/e4m3_codec.hpp"
#include "reference/float_io.hpp"
#include "reference/index_keys.hpp"
#include "reference/step_rows.hpp"

namespace echo {
namespace {

/// Consecutive rows of the block that share a block table, and the key blocks that the furthest of
/// them reaches.
struct Entry {
  std::int32_t first;  ///< row of the block
  std::int32_t count;
};

struct Piece {
  Entry entry;
  std::int32_t key_block;
};

struct Queries {
  std::vector<float> values;   ///< [rows, heads, dim] as they enter the dot product
  std::vector<float> weights;  ///< [rows, heads] with the queries' scales
};

Queries prepare_queries(ThreadPool& pool, const ScoreParams& params) {
  const std::int64_t heads = params.shape.index_heads;
  const std::int64_t dim = params.shape.index_dim;
  const std::int64_t rows = params.block.count;
  Queries queries{.values = std::vector<float>(static_cast<std::size_t>(rows * heads * dim)),
                  .weights = std::vector<float>(static_cast<std::size_t>(rows * heads))};
  pool.parallel_for(rows * heads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t source = params.block.first * heads + i;
      float* query = queries.values.data() + i * dim;
      load_floats(params.index_q, params.index_q_dtype, source * dim, dim, query);
      queries.weights[static_cast<std::size_t>(i)] =
          params.index_weights[source] * quantise_index_query(query, params.shape);
    }
  });
  return queries;
}

std::vector<Piece> cut(const ScoreParams& params) {
  std::vector<Piece> pieces;
  for (std::int32_t first = 0; first < params.block.count;) {
    const std::int32_t entry = (params.block.first + first) / params.step.query_rows;
    const std::int32_t last = std::min(params.block.count, (entry + 1) * params.step.query_rows - params.block.first);
    std::int32_t longest = kNone;
    for (std::int32_t i = first; i < last; ++i) {
      longest = std::max(longest, position_of(params.step, params.block.first + i));
    }
    if (longest >= params.score_stride) {
      throw StateError("positions: a row is at " + std::to_string(longest) + ", there is room for " +
                       std::to_string(params.score_stride) + " scores");
    }
    const std::int32_t key_blocks = longest / kTokensPerBlock + (longest == kNone ? 0 : 1);
    for (std::int32_t block = 0; block < key_blocks; ++block) {
      pieces.push_back({.entry = {.first = first, .count = last - first}, .key_block = block});
    }
    first = last;
  }
  return pieces;
}

/// Buffers of one thread.
struct Scratch {
  explicit Scratch(const ScoreParams& params)
      : tile(static_cast<std::size_t>(kTileTokens * params.shape.index_dim)),
        scores(static_cast<std::size_t>(params.block.count) * kTileTokens) {}

  std::vector<float> tile;
  std::vector<float> scores;
  float scales[kTileTokens] = {};
};

void load_tile(const ScoreLoops& loops, const ScoreParams& params, const Piece& piece, Scratch& scratch) {
  const std::int32_t host_block = host_block_of(params.layer, params.step, params.block.first + piece.entry.first,
                                                piece.key_block * kTokensPerBlock);
  const std::byte* keys = row_address(params.layer.index_keys, host_block, params.layer.index_block_bytes);
  if (params.shape.index_key_format == IndexKeyFormat::fp8) {
    loops.decode_tile(reinterpret_cast<const std::uint8_t*>(keys), e4m3_values().data(), params.shape.index_dim,
                      scratch.tile.data());
  } else {
    loops.transpose_tile(reinterpret_cast<const float*>(keys), params.shape.index_dim, scratch.tile.data());
  }
  load_index_scales(keys, params.shape, scratch.scales);
}

void score_piece(const ScoreLoops& loops, const ScoreParams& params, const Queries& queries, const Piece& piece,
                 Scratch& scratch) {
  const std::int32_t heads = params.shape.index_heads;
  const std::int32_t start = piece.key_block * kTokensPerBlock;
  const auto reaches = [&](std::int32_t i) { return params.step.positions[params.block.first + i] >= start; };
  const std::int32_t end = piece.entry.first + piece.entry.count;
  std::int32_t i = piece.entry.first;
  load_tile(loops, params, piece, scratch);
  while (i < end) {
    // Rows that reach this block, as many as lie together: all but the first few of a prefill.
    const std::int32_t first = i;
    while (i < end && reaches(i)) {
      ++i;
    }
    const std::int64_t query = static_cast<std::int64_t>(first) * heads;
    loops.score_tile({.queries = queries.values.data() + query * params.shape.index_dim,
                      .weights = queries.weights.data() + query,
                      .rows = i - first,
                      .heads = heads,
                      .dim = params.shape.index_dim},
                     scratch.tile.data(), scratch.scales, scratch.scores.data());
    for (std::int32_t row = first; row < i; ++row) {
      const std::int32_t visible = params.step.positions[params.block.first + row] - start + 1;
      std::memcpy(params.scores + row * params.score_stride + start,
                  scratch.scores.data() + static_cast<std::ptrdiff_t>(row - first) * kTileTokens,
                  static_cast<std::size_t>(std::min(visible, kTileTokens)) * sizeof(float));
    }
    while (i < end && !reaches(i)) {
      ++i;
    }
  }
}

}  // namespace

static_assert(kTileTokens == kTokensPerBlock);

void score_rows(ThreadPool& pool, const ScoreLoops& loops, const ScoreParams& params) {
  const std::vector<Piece> pieces = cut(params);
  const Queries queries = prepare_queries(pool, params);
  pool.parallel_for(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t begin, std::int64_t end) {
    Scratch scratch(params);
    for (std::int64_t i = begin; i < end; ++i) {
      score_piece(loops, params, queries, pieces[static_cast<std::size_t>(i)], scratch);
    }
  });
}

}  // namespace echo
