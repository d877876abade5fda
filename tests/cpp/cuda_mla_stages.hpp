#pragma once
// The stages of attend_sm90 one by one, on one block: what the gathering warpgroups leave in shared memory, the
// logits, the sums before the splits are combined.

#include <cstdint>
#include <vector>

#include "kernels/mla_tile.cuh"
#include "kernels/params.hpp"

namespace echo::mla_stages {

constexpr std::int32_t kSlots = 300;
constexpr float kScale = 0.07F;

enum class Stage { rows, logits, sums };

/// A pool of random rows, a selection, 64 queries.
struct Case {
  RowFormat format;
  std::vector<std::byte> pool;
  std::vector<std::int32_t> slots;
  std::vector<std::uint16_t> q;

  /// `wild`: NaN codes, scales from 2^-20 to 2^19, and odd ones too.
  Case(RowFormat format_, std::int32_t tiles, unsigned seed, bool wild = false);
  std::int32_t row_bytes() const;
  /// Element of a row, in bf16 as the tensor cores have to see it.
  std::uint16_t element(std::int32_t slot, int i) const;
  double logit(int head, std::int32_t slot) const;
};

/// What one stage gave.
struct Result {
  std::vector<std::byte> rows;
  std::vector<std::uint64_t> entries;
  std::vector<float> logits, out, references, sums;
};

/// `whole`: as launches whose selections are one split do it; with FP8 rows.
Result run(Stage stage, const Case& input, bool whole);

}  // namespace echo::mla_stages
