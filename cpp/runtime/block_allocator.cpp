#include "runtime/block_allocator.hpp"

#include <algorithm>
#include <iterator>

namespace echo {

BlockAllocator::BlockAllocator(std::int32_t blocks) : holders_(static_cast<std::size_t>(blocks)), free_blocks_(blocks) {
  if (blocks > 0) {
    runs_.emplace(0, blocks);
  }
}

std::optional<std::vector<std::int32_t>> BlockAllocator::allocate(std::int32_t count) {
  if (count > free_blocks_) {
    return std::nullopt;
  }
  std::vector<std::int32_t> blocks;
  blocks.reserve(static_cast<std::size_t>(count));
  while (static_cast<std::int32_t>(blocks.size()) < count) {
    const std::int32_t missing = count - static_cast<std::int32_t>(blocks.size());
    auto best = runs_.begin();
    for (auto run = runs_.begin(); run != runs_.end(); ++run) {
      const bool fits = run->second >= missing;
      const bool best_fits = best->second >= missing;
      const bool better = fits ? !best_fits || run->second < best->second : !best_fits && run->second > best->second;
      if (better) {
        best = run;
      }
    }
    take(best, std::min(missing, best->second), blocks);
  }
  return blocks;
}

void BlockAllocator::share(std::span<const std::int32_t> blocks) {
  for (const std::int32_t block : blocks) {
    ++holders_[static_cast<std::size_t>(block)];
  }
}

std::vector<std::int32_t> BlockAllocator::drop(std::span<const std::int32_t> blocks) {
  std::vector<std::int32_t> orphans;
  for (const std::int32_t block : blocks) {
    if (--holders_[static_cast<std::size_t>(block)] == 0) {
      orphans.push_back(block);
    }
  }
  return orphans;
}

void BlockAllocator::recycle(std::span<const std::int32_t> blocks) {
  for (std::size_t i = 0; i < blocks.size();) {
    std::size_t end = i + 1;
    while (end < blocks.size() && blocks[end] == blocks[end - 1] + 1) {
      ++end;
    }
    give(blocks[i], static_cast<std::int32_t>(end - i));
    i = end;
  }
}

std::int32_t BlockAllocator::largest_run() const {
  std::int32_t largest = 0;
  for (const auto& [first, length] : runs_) {
    largest = std::max(largest, length);
  }
  return largest;
}

void BlockAllocator::take(Runs::iterator run, std::int32_t count, std::vector<std::int32_t>& out) {
  const auto [first, length] = *run;
  for (std::int32_t i = 0; i < count; ++i) {
    out.push_back(first + i);
    holders_[static_cast<std::size_t>(first + i)] = 1;
  }
  runs_.erase(run);
  if (count < length) {
    runs_.emplace(first + count, length - count);
  }
  free_blocks_ -= count;
}

void BlockAllocator::give(std::int32_t first, std::int32_t length) {
  free_blocks_ += length;
  auto next = runs_.lower_bound(first);
  if (next != runs_.end() && next->first == first + length) {
    length += next->second;
    next = runs_.erase(next);
  }
  if (next != runs_.begin()) {
    if (const auto previous = std::prev(next); previous->first + previous->second == first) {
      previous->second += length;
      return;
    }
  }
  runs_.emplace(first, length);
}

}  // namespace echo
