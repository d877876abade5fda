#pragma once
// What a forecast looks at (near_tokens.cuh): the list that the top-k is found in. It also has the tokens that just
// miss it, about 0.75 k of them. All of it is left, in the order in which threads hold it: what is selected is resident
// when a forecast looks, so nobody has to tell it apart, and selection waits for nothing.

#include "kernels/near_lists.hpp"
#include "kernels/select_list.cuh"

namespace echo::top_k {

static_assert(kMostNear == List::kHeld * kListThreads);

/// By one thread of a row's first block: what another layer left must not be taken for the row's own.
__device__ inline void begin_near(const NearLists& near, std::int32_t index) {
  if (near.tokens != nullptr) {
    near.counts[index] = 0;
  }
  if (near.ended != nullptr && index == 0) {
    *near.ended = 1;
  }
}

/// Leaves the entries that threads hold. By the block, behind begin_near.
__device__ inline void leave_near(const List& list, const NearLists& near, std::int32_t index) {
  if (near.tokens == nullptr) {
    return;
  }
  ScoredToken* tokens = near.tokens + static_cast<std::int64_t>(index) * kMostNear;
#pragma unroll
  for (std::int32_t i = 0; i < List::kHeld; ++i) {
    tokens[List::index_of(i)] = {.key = key_of(list.held[i]), .position = position_in(list.held[i])};
  }
  if (threadIdx.x == 0) {
    near.counts[index] = list.count;
  }
}

}  // namespace echo::top_k
