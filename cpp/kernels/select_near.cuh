#pragma once
// What a forecast looks at (near_tokens.cuh): the list that the top-k is found in. It also has the tokens that just
// miss it, about 0.75 k of them. All of it is left, in its order: what is selected is resident when a forecast looks,
// so nobody has to tell it apart, and selection waits for nothing.

#include "kernels/near_lists.hpp"
#include "kernels/select_list.cuh"

namespace echo::top_k {

/// By one thread of a row's first block: what another layer left must not be taken for the row's own.
__device__ inline void begin_near(const NearLists& near, std::int32_t index) {
  if (near.tokens != nullptr) {
    near.counts[index] = 0;
  }
  if (near.ended != nullptr && index == 0) {
    *near.ended = 1;
  }
}

/// Leaves the list, as far as there is room. By the block, behind begin_near.
__device__ inline void leave_near(const List& list, const NearLists& near, std::int32_t index) {
  if (near.tokens == nullptr) [[likely]] {
    return;
  }
  ScoredToken* tokens = near.tokens + static_cast<std::int64_t>(index) * kMostNear;
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < min(list.count, kMostNear); i += kListThreads) {
    tokens[i] = {.key = key_of(list.entries[i]), .position = position_in(list.entries[i])};
  }
  if (threadIdx.x == 0) {
    near.counts[index] = list.count;
  }
}

}  // namespace echo::top_k
