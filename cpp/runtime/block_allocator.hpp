#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

namespace echo {

/// Gives out blocks of 64 tokens. A block number stands for 64 host rows in every layer and for one block of
/// index keys in every layer, so one table per session serves both. Prefers one contiguous run: rows that lie
/// together travel together (address translation, not bytes, bounds recall). Sessions that were forked share
/// blocks; a block that nobody holds any more is recycled, by the caller, once no step in flight can touch it.
class BlockAllocator {
 public:
  explicit BlockAllocator(std::int32_t blocks);

  /// The smallest free run that holds `count` blocks, or else the largest runs until it is enough. Nothing
  /// happens, and nothing is returned, where fewer than `count` blocks are free.
  std::optional<std::vector<std::int32_t>> allocate(std::int32_t count);
  /// One more holder for each of the blocks.
  void share(std::span<const std::int32_t> blocks);
  /// One holder fewer for each of the blocks. Returns those that have none left.
  std::vector<std::int32_t> drop(std::span<const std::int32_t> blocks);
  /// Makes blocks that drop returned free to be given out again.
  void recycle(std::span<const std::int32_t> blocks);

  std::int32_t holders(std::int32_t block) const { return holders_[static_cast<std::size_t>(block)]; }
  std::int32_t free_blocks() const { return free_blocks_; }
  std::int32_t largest_run() const;

 private:
  using Runs = std::map<std::int32_t, std::int32_t>;  // first block -> length; neighbours always merged

  void take(Runs::iterator run, std::int32_t count, std::vector<std::int32_t>& out);
  void give(std::int32_t first, std::int32_t length);

  Runs runs_;
  std::vector<std::int32_t> holders_;  // [blocks]
  std::int32_t free_blocks_;
};

}  // namespace echo
