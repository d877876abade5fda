#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/backend.hpp"
#include "runtime/block_allocator.hpp"
#include "runtime/device_state.hpp"

namespace echo {

/// Which session, fork or view holds which blocks, and when a block may be given out again.
///
/// A block whose last session is gone loses its slots at once. It is given out again only when no view of its rows is
/// left, and when the steps that were in flight then are over: in between it is in quarantine, since the CPU may write
/// to rows of a new session at any time.
class BlockPool {
 public:
  /// Blocks that belong to nobody yet; they go back unless taken.
  class Lease {
   public:
    Lease(BlockPool& pool, std::vector<std::int32_t> blocks) : pool_(pool), blocks_(std::move(blocks)) {}
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    const std::vector<std::int32_t>& blocks() const { return blocks_; }
    std::vector<std::int32_t> take() { return std::exchange(blocks_, {}); }

   private:
    BlockPool& pool_;
    std::vector<std::int32_t> blocks_;
  };

  BlockPool(std::shared_ptr<Backend> backend, std::shared_ptr<const DeviceState> device, std::int32_t blocks);

  /// `count` blocks, consecutive where possible. Throws CapacityError: `what` needs so many, so many are free.
  Lease allocate(std::int64_t count, const std::string& what);
  /// One more session holds the blocks.
  void share(std::span<const std::int32_t> blocks) { allocator_.share(blocks); }
  /// A session gives up blocks.
  void drop(std::span<const std::int32_t> blocks);
  /// Keeps blocks of the session with number `session` out of other hands for as long as the returned pointer lives,
  /// which also keeps `memory`.
  std::shared_ptr<const void> view(std::int64_t session, std::vector<std::int32_t> blocks,
                                   std::shared_ptr<const void> memory);

  /// Whether several sessions hold the block.
  bool shared(std::int32_t block) const;
  /// Whether the session with number `session` must not write to the block: another session holds it, or a view of
  /// another one, open or closed, shows it.
  bool shown_to_others(std::int32_t block, std::int64_t session) const;
  /// Blocks that a session could get: free ones, and those in quarantine.
  std::int64_t free_blocks();

 private:
  struct View {
    std::weak_ptr<const void> token;
    std::int64_t session;
    std::vector<std::int32_t> blocks;
  };
  struct Quarantined {
    std::uint64_t mark;
    std::vector<std::int32_t> blocks;
  };

  void quarantine(std::vector<std::int32_t> orphans);
  /// Lets go of views that are gone, and of blocks whose quarantine is over.
  void reap();

  std::shared_ptr<Backend> backend_;
  std::shared_ptr<const DeviceState> device_;
  BlockAllocator allocator_;
  std::vector<std::int32_t> viewers_;  // [blocks]
  std::vector<View> views_;
  std::deque<Quarantined> quarantine_;  // oldest first
  std::int32_t blocks_;
};

}  // namespace echo
