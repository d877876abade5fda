// The part of RecallCase that looks at what its replays left behind.

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.hpp"
#include "echo/errors.hpp"
#include "hashes.hpp"
#include "recall_case.hpp"
#include "reference/row_codec.hpp"

namespace echo::bench {

void RecallCase::check_pools() {
  const Buffer buffer(backend_->device_memory(), sizeof(Findings), "findings");
  backend_->fill(buffer.data(), 0, buffer.bytes());
  const bool has_new = sizes_.new_rows != 0;
  launch_check({.layers = layers_.device_views(),
                .layer_count = kLayers,
                .step = control_.step(sizes_.batch),
                .slots = sizes_.pool_slots,
                .host_rows = control_.host_rows(),
                .layer_entries = layer_entries_,
                .selection = selection_.data<std::int32_t>(),
                .chosen_slots = slots_.data<std::int32_t>(),
                .bytes = bytes_valid_,
                .session_rows = control_.rows_of(0).count,
                .first_new = has_new ? sizes_.length - kNewTokens : std::numeric_limits<std::int32_t>::max(),
                .findings = buffer.data<Findings>()},
               context());
  Findings findings{};
  backend_->copy_to_host(&findings, buffer.data(), sizeof findings);
  const std::int64_t free = layers_.free_slots();
  const auto expected = static_cast<unsigned long long>(std::int64_t{kLayers} * sizes_.pool_slots - free);
  const bool full = free == 0 || last_ == Kind::released;
  if (findings.wrong_entries + findings.wrong_maps + findings.wrong_rows != 0 || findings.resident != expected ||
      !full) {
    throw StateError("verify: " + std::to_string(findings.wrong_entries) + " wrong entries, " +
                     std::to_string(findings.wrong_maps) + " wrong maps, " + std::to_string(findings.wrong_rows) +
                     " slots with wrong bytes; " + std::to_string(findings.resident) + " resident rows, expected " +
                     std::to_string(expected) + " with " + std::to_string(free) + " free slots");
  }
}

void RecallCase::check_new_host_rows() const {
  const std::int32_t session_rows = control_.rows_of(0).count;
  const std::int32_t first_new = sizes_.length - kNewTokens;
  const auto row_bytes = static_cast<std::size_t>(sizes_.row_bytes);
  std::vector<float> values(static_cast<std::size_t>(shape_.latent_dim + shape_.rope_dim));
  std::vector<std::byte> expected(row_bytes);
  std::int64_t wrong = 0;
  // The rows around them have to be as they were.
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    for (std::int32_t entry = 0; entry < sizes_.batch; ++entry) {
      for (std::int32_t position = first_new - kTokensPerBlock; position < session_rows; ++position) {
        const std::int32_t row = entry * session_rows + position;
        if (position >= first_new && position < first_new + new_tokens_) {
          for (std::size_t dim = 0; dim < values.size(); ++dim) {
            values[dim] = from_bf16(kv_element(layer, entry, position, static_cast<std::int32_t>(dim)));
          }
          encode_row(values.data(), shape_, expected.data());
        } else {
          for (std::size_t word = 0; word < row_bytes / 4; ++word) {
            const std::uint32_t bits = row_word(layer, row, static_cast<std::int32_t>(word), sizes_.row_bytes);
            std::memcpy(expected.data() + 4 * word, &bits, sizeof bits);
          }
        }
        const std::int64_t index = layer * control_.host_rows() + row;
        const std::byte* found = host_.data() + index * sizes_.row_bytes;
        wrong += std::memcmp(found, expected.data(), row_bytes) == 0 ? 0 : 1;
      }
    }
  }
  if (wrong != 0) {
    throw StateError("verify: " + std::to_string(wrong) + " host rows at and around the new tokens are wrong");
  }
}

}  // namespace echo::bench
