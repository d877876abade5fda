// The part of StepCase that looks at what its replays left behind.

#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"
#include "echo/errors.hpp"
#include "rows.hpp"
#include "step_case.hpp"

namespace echo::bench {
namespace {

constexpr std::int32_t kEvery = 6;  ///< layers of which outputs are compared
constexpr std::int32_t kGatherBlocks = 64;

}  // namespace

void StepCase::verify() {
  if (last_ < StepPart::select || last_ == StepPart::gather) {
    throw StateError("verify: the last replay selected nothing");
  }
  check_selections();
  if (last_ == StepPart::recall || last_ == StepPart::attend) {
    check_pools();
  }
  if (last_ == StepPart::attend || last_ == StepPart::without_offload) {
    check_outputs();
  }
}

void StepCase::check_selections() const {
  std::vector<std::int32_t> found(selection_.bytes() / sizeof(std::int32_t));
  std::vector<std::int32_t> expected(found.size());
  backend_->copy_to_host(found.data(), selection_.data(), selection_.bytes());
  backend_->copy_to_host(expected.data(), expected_.data(), expected_.bytes());
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    wrong += found[i] == expected[i] && found[i] >= 0 ? 0 : 1;
  }
  if (wrong != 0) {
    throw StateError("verify: " + std::to_string(wrong) + " selected positions of " + std::to_string(found.size()) +
                     " are not those of the preparation");
  }
}

void StepCase::check_pools() const {
  const Buffer buffer(backend_->device_memory(), sizeof(Findings), "findings");
  backend_->fill(buffer.data(), 0, buffer.bytes());
  launch_check(
      {.layers = layers_.device_views(),
       .layer_count = sizes_.layers,
       .step = step(),
       .slots = sizes_.pool_slots,
       .host_rows = control_.host_rows(),
       .layer_entries = entries(),
       .selection = selection_.data<std::int32_t>(),
       .chosen_slots = slots_.data<std::int32_t>(),
       .bytes = true,
       .session_rows = control_.rows_of(0).count,
       .first_new = sizes_.new_rows != 0 ? sizes_.length - kStepTokens : std::numeric_limits<std::int32_t>::max(),
       .findings = buffer.data<Findings>()},
      context());
  Findings findings{};
  backend_->copy_to_host(&findings, buffer.data(), sizeof findings);
  const auto full = static_cast<unsigned long long>(sizes_.layers) * static_cast<unsigned long long>(sizes_.pool_slots);
  if (findings.wrong_entries + findings.wrong_maps + findings.wrong_rows != 0 ||
      (!whole_pools() && !forecasts() && findings.resident != full)) {
    throw StateError("verify: " + std::to_string(findings.wrong_entries) + " wrong entries, " +
                     std::to_string(findings.wrong_maps) + " wrong maps, " + std::to_string(findings.wrong_rows) +
                     " slots with wrong bytes; " + std::to_string(findings.resident) + " resident rows of " +
                     std::to_string(full));
  }
}

/// The rows as the host has them, side by side in the order of the selection, have to give the same bits.
void StepCase::check_outputs() const {
  const auto count = static_cast<std::size_t>(entries());
  std::vector<std::int32_t> slots(count);
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<std::int32_t> rows(count);
  const auto allocate = [&](std::size_t bytes) { return Buffer(backend_->device_memory(), bytes, "checks"); };
  const Buffer device_slots = allocate(count * sizeof(std::int32_t));
  const Buffer device_rows = allocate(count * sizeof(std::int32_t));
  const Buffer out = allocate(out_.bytes() / static_cast<std::size_t>(sizes_.layers));
  backend_->copy_to_device(device_slots.data(), slots.data(), device_slots.bytes());
  std::vector<std::byte> found(out.bytes());
  std::vector<std::byte> expected(out.bytes());
  for (std::int32_t layer = 0; layer < sizes_.layers; layer += kEvery) {
    AttendParams attend = attend_params(layer);
    backend_->copy_to_host(found.data(), attend.out, found.size());
    backend_->copy_to_host(rows.data(), recall_params(layer).selection, device_rows.bytes());
    for (std::size_t i = 0; i < count; ++i) {
      rows[i] += static_cast<std::int32_t>(i) / kTopK * control_.rows_of(0).count;
    }
    backend_->copy_to_device(device_rows.data(), rows.data(), device_rows.bytes());
    const LayerView source = last_ == StepPart::attend ? view(layer) : view_without_offload(layer);
    launch_gather({.slab = source.slab,
                   .host_stride = source.host_stride,
                   .row_bytes = source.row_bytes,
                   .rows = device_rows.data<std::int32_t>(),
                   .count = entries(),
                   .target = gathered_.data()},
                  kGatherBlocks, context());
    attend.layer.pool = gathered_.data();
    attend.layer.slots = entries();
    attend.slots = device_slots.data<std::int32_t>();
    attend.out = out.data();
    backend_->attend(attend);
    backend_->copy_to_host(expected.data(), out.data(), expected.size());
    std::int64_t wrong = 0;
    std::int64_t odd = 0;
    for (std::size_t i = 0; i < found.size(); i += sizeof(std::uint16_t)) {
      std::uint16_t a = 0;
      std::uint16_t b = 0;
      std::memcpy(&a, found.data() + i, sizeof a);
      std::memcpy(&b, expected.data() + i, sizeof b);
      wrong += a == b ? 0 : 1;
      odd += (a & 0x7F80U) == 0x7F80U ? 1 : 0;  // infinite, or no number
    }
    if (wrong + odd != 0) {
      throw StateError("verify: " + std::to_string(wrong) + " output elements of layer " + std::to_string(layer) +
                       " have other bits than from the host's rows, " + std::to_string(odd) + " are not finite");
    }
  }
}

}  // namespace echo::bench
