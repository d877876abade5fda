// attend: softmax over the selected rows of each query, then their weighted sum, all in fp32.
//
// One piece of work is a query row with some of its heads; with fewer rows than threads, heads are
// divided. It decodes the selected rows into floats (2.3 KB each; 4.7 MB for 2,048), takes all
// logits, the softmax over the whole selection, and the weighted sum. Both products run over tiles
// of 32 rows, small enough for the L2 cache (simd/attend_loops.cpp). Each head is summed
// in the order of the selection, whoever shares its piece.
#include "reference/attend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "echo/errors.hpp"
#include "reference/float_io.hpp"
#include "reference/row_codec.hpp"

namespace echo {
namespace {

constexpr std::int32_t kTileRows = 32;
constexpr std::int64_t kLeastHeads = 4;  ///< of a piece: fewer would not pay for decoding the rows

/// Buffers of one thread; uninitialised, because most of it is written before it is read.
struct Scratch {
  Scratch(const ShapeView& shape, std::int32_t heads)
      : rows(floats(shape.top_k, shape.latent_dim + shape.rope_dim)),
        queries(floats(heads, shape.latent_dim + shape.rope_dim)),
        weights(floats(heads, shape.top_k)),
        out(floats(heads, shape.latent_dim)) {}

  static std::unique_ptr<float[]> floats(std::int32_t rows, std::int32_t columns) {
    return std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
  }

  std::unique_ptr<float[]> rows;     ///< [selected, row_dim]
  std::unique_ptr<float[]> queries;  ///< [heads, row_dim]
  std::unique_ptr<float[]> weights;  ///< [heads, top_k] logits, then softmax weights
  std::unique_ptr<float[]> out;      ///< [heads, latent_dim]
};

/// Decodes the rows that are selected, without the gaps, and returns how many there are.
std::int32_t decode_selected(const AttendParams& params, std::int32_t i, float* rows) {
  const std::int32_t row_dim = params.shape.latent_dim + params.shape.rope_dim;
  const std::int32_t* slots = params.slots + static_cast<std::int64_t>(i) * params.shape.top_k;
  std::int32_t count = 0;
  for (std::int32_t j = 0; j < params.shape.top_k; ++j) {
    if (slots[j] == kNone) {
      continue;
    }
    if (slots[j] < 0 || slots[j] >= params.layer.slots) {
      throw StateError("slots: " + std::to_string(slots[j]) + " given, the pool has " +
                       std::to_string(params.layer.slots));
    }
    decode_row(row_address(params.layer.pool, slots[j], params.layer.row_bytes), params.shape,
               rows + static_cast<std::ptrdiff_t>(count) * row_dim);
    ++count;
  }
  return count;
}

/// Logits to exp(scale * logit - maximum); returns their sum.
float soften(float* logits, std::int32_t count, float scale) {
  float most = -std::numeric_limits<float>::infinity();
  for (std::int32_t t = 0; t < count; ++t) {
    logits[t] *= scale;
    most = std::max(most, logits[t]);
  }
  float sum = 0.0F;
  for (std::int32_t t = 0; t < count; ++t) {
    logits[t] = std::exp(logits[t] - most);
    sum += logits[t];
  }
  return sum;
}

void attend_heads(const AttendLoops& loops, const AttendParams& params, std::int32_t i, std::int32_t first_head,
                  std::int32_t heads, Scratch& scratch) {
  const ShapeView& shape = params.shape;
  const std::int32_t row_dim = shape.latent_dim + shape.rope_dim;
  const std::int64_t head = static_cast<std::int64_t>(params.block.first + i) * shape.query_heads + first_head;
  const std::int32_t count = decode_selected(params, i, scratch.rows.get());
  const auto for_tiles = [&](auto&& work) {
    for (std::int32_t t = 0; t < count; t += kTileRows) {
      work(AttendTile{.rows = scratch.rows.get() + static_cast<std::ptrdiff_t>(t) * row_dim,
                      .count = std::min(kTileRows, count - t),
                      .heads = heads,
                      .row_dim = row_dim,
                      .latent_dim = shape.latent_dim,
                      .stride = shape.top_k},
           scratch.weights.get() + t);
    }
  };

  load_floats(params.q, params.q_dtype, head * row_dim, static_cast<std::int64_t>(heads) * row_dim,
              scratch.queries.get());
  for_tiles([&](const AttendTile& tile, float* logits) { loops.dot_rows(tile, scratch.queries.get(), logits); });
  std::vector<float> sums(static_cast<std::size_t>(heads));
  for (std::int32_t h = 0; h < heads; ++h) {
    sums[static_cast<std::size_t>(h)] =
        soften(scratch.weights.get() + static_cast<std::ptrdiff_t>(h) * shape.top_k, count, params.scale);
  }

  std::fill_n(scratch.out.get(), static_cast<std::ptrdiff_t>(heads) * shape.latent_dim, 0.0F);
  for_tiles([&](const AttendTile& tile, const float* weights) { loops.add_rows(tile, weights, scratch.out.get()); });
  for (std::int32_t h = 0; h < heads && count > 0; ++h) {
    float* out = scratch.out.get() + static_cast<std::ptrdiff_t>(h) * shape.latent_dim;
    std::transform(out, out + shape.latent_dim, out,
                   [sum = sums[static_cast<std::size_t>(h)]](float value) { return value / sum; });
  }
  store_floats(scratch.out.get(), static_cast<std::int64_t>(heads) * shape.latent_dim, params.out, params.out_dtype,
               head * shape.latent_dim);
}

}  // namespace

void attend_rows(ThreadPool& pool, const AttendLoops& loops, const AttendParams& params) {
  if (params.shape.row_format == RowFormat::raw) {
    throw NotSupported("row_format: raw rows cannot be attended to; choose fp8_656, bf16_1152 or fp32");
  }
  const std::int64_t all_heads = params.shape.query_heads;
  const std::int64_t rows = params.block.count;
  const std::int64_t groups_wanted = rows == 0 ? 1 : (pool.threads() + rows - 1) / rows;
  const std::int64_t heads = std::max(kLeastHeads, (all_heads + groups_wanted - 1) / groups_wanted);
  const std::int64_t groups = (all_heads + heads - 1) / heads;
  pool.parallel_for(rows * groups, [&](std::int64_t begin, std::int64_t end) {
    Scratch scratch(params.shape, static_cast<std::int32_t>(std::min(heads, all_heads)));
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t first_head = piece % groups * heads;
      attend_heads(loops, params, static_cast<std::int32_t>(piece / groups), static_cast<std::int32_t>(first_head),
                   static_cast<std::int32_t>(std::min(heads, all_heads - first_head)), scratch);
    }
  });
}

}  // namespace echo
