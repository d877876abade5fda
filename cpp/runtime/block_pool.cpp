#include "runtime/block_pool.hpp"

#include <algorithm>
#include <iterator>
#include <string>

#include "echo/errors.hpp"

namespace echo {

BlockPool::Lease::~Lease() {
  if (!blocks_.empty()) {
    pool_.allocator_.recycle(pool_.allocator_.drop(blocks_));  // nothing on the device knows them yet
  }
}

BlockPool::BlockPool(std::shared_ptr<Backend> backend, std::shared_ptr<const DeviceState> device, std::int32_t blocks)
    : backend_(std::move(backend)),
      device_(std::move(device)),
      allocator_(blocks),
      viewers_(static_cast<std::size_t>(blocks)),
      blocks_(blocks) {}

BlockPool::Lease BlockPool::allocate(std::int64_t count, const std::string& what) {
  reap();
  if (count > allocator_.free_blocks() && !quarantine_.empty()) {
    backend_->wait();
    reap();
  }
  std::optional<std::vector<std::int32_t>> blocks = allocator_.allocate(static_cast<std::int32_t>(count));
  if (!blocks) {
    throw CapacityError(what + " needs " + std::to_string(count) + " blocks of 64 host rows, " +
                        std::to_string(allocator_.free_blocks()) + " of " + std::to_string(blocks_) + " are free");
  }
  return {*this, std::move(*blocks)};
}

void BlockPool::drop(std::span<const std::int32_t> blocks) {
  std::vector<RowRun> unused;
  for (const std::int32_t block : blocks) {
    if (!shared(block)) {
      const std::int32_t first = block * kTokensPerBlock;
      if (!unused.empty() && unused.back().first + unused.back().count == first) {
        unused.back().count += kTokensPerBlock;
      } else {
        unused.push_back({.first = first, .count = kTokensPerBlock});
      }
    }
  }
  backend_->release(device_->layers(), unused);
  quarantine(allocator_.drop(blocks));
  reap();
}

std::shared_ptr<const void> BlockPool::view(std::int64_t session, std::vector<std::int32_t> blocks,
                                            std::shared_ptr<const void> memory) {
  reap();  // else views that come and go would pile up where nothing else is asked for
  auto token = std::make_shared<const std::shared_ptr<const void>>(std::move(memory));
  allocator_.share(blocks);
  for (const std::int32_t block : blocks) {
    ++viewers_[static_cast<std::size_t>(block)];
  }
  views_.push_back({.token = token, .session = session, .blocks = std::move(blocks)});
  return token;
}

bool BlockPool::shared(std::int32_t block) const {
  return allocator_.holders(block) - viewers_[static_cast<std::size_t>(block)] > 1;
}

bool BlockPool::shown_to_others(std::int32_t block, std::int64_t session) const {
  return shared(block) ||
         (viewers_[static_cast<std::size_t>(block)] > 0 && std::ranges::any_of(views_, [&](auto& view) {
            return view.session != session && !view.token.expired() &&
                   std::ranges::find(view.blocks, block) != view.blocks.end();
          }));
}

std::int64_t BlockPool::free_blocks() {
  reap();
  std::int64_t count = allocator_.free_blocks();
  for (const Quarantined& waiting : quarantine_) {
    count += std::ssize(waiting.blocks);
  }
  return count;
}

void BlockPool::quarantine(std::vector<std::int32_t> orphans) {
  if (!orphans.empty()) {
    quarantine_.push_back({.mark = backend_->mark(), .blocks = std::move(orphans)});
  }
}

void BlockPool::reap() {
  for (std::size_t i = 0; i < views_.size();) {
    if (!views_[i].token.expired()) {
      ++i;
      continue;
    }
    for (const std::int32_t block : views_[i].blocks) {
      --viewers_[static_cast<std::size_t>(block)];
    }
    quarantine(allocator_.drop(views_[i].blocks));
    std::swap(views_[i], views_.back());
    views_.pop_back();
  }
  while (!quarantine_.empty() && backend_->done(quarantine_.front().mark)) {
    allocator_.recycle(quarantine_.front().blocks);
    quarantine_.pop_front();
  }
}

}  // namespace echo
