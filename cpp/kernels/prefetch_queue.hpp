#pragma once

#include <cstdint>

namespace echo {

inline constexpr std::int32_t kQueuePlaces = 8192;
/// Where calls are counted from 0 again, with an empty queue: no call has the tag 0, which unused places have.
inline constexpr std::uint32_t kLastCall = 0xFFFFFFFFU;

/// A row that is to be fetched, kNone if it turned out to be somebody else's, in the call whose tag it has: whatever
/// else lies in a place is older.
struct alignas(8) QueuedRow {
  std::uint32_t tag;
  std::int32_t row;
};

/// Rows on their way from the thread blocks of a score to those that prefetch, zero before the first call. Whoever is
/// the last to need it in a call leaves it as the next one needs it.
struct PrefetchQueue {
  std::uint32_t call;      ///< counts calls; the tag is one more
  std::int32_t listed;     ///< places asked for, those beyond the last and those without a row included
  std::int32_t finished;   ///< thread blocks that list no more
  std::int32_t dismissed;  ///< thread blocks that look no more
  QueuedRow rows[kQueuePlaces];
};

}  // namespace echo
