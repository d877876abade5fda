#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

namespace echo {

inline constexpr std::size_t kPinnedChunk = std::size_t{1} << 30;  ///< bytes registered by one call

/// Pages of this process that are registered with CUDA.
struct PinnedRegion {
  std::byte* begin;
  std::size_t bytes;
  std::byte* alias;  ///< where kernels see it
};

/// Gives a region back: chunks are unregistered, pages unmapped. Works as well when the driver is gone already.
void give_back(const PinnedRegion& region, int device) noexcept;

/// What keep_host_memory keeps: regions between two owners. One for the process; never destroyed, since at exit the
/// driver may go first.
class PinnedCache {
 public:
  static PinnedCache& instance();

  void keep(bool on);
  /// Whether the region was taken over; else it still belongs to the caller.
  bool put(const PinnedRegion& region, int device) noexcept;
  /// A region of exactly so many bytes, if there is one.
  std::optional<PinnedRegion> take(std::size_t bytes, int device);
  /// Gives back everything.
  void clear() noexcept;
  std::size_t bytes() const;

 private:
  struct Kept {
    PinnedRegion region;
    int device;
  };
  mutable std::mutex mutex_;
  bool keeps_ = false;
  std::vector<Kept> kept_;
};

}  // namespace echo
