#pragma once

#include <cstdint>

#include "kernels/params.hpp"

namespace echo {

/// Position of a row of the pass, kNone if it is padding. Throws StateError naming `positions` if
/// the row's block table does not reach that far.
std::int32_t position_of(const StepView& step, std::int32_t row);

/// Tokens a block table can hold.
std::int32_t table_capacity(const StepView& step);

/// The block table of the row's session.
const std::int32_t* block_table_of(const StepView& step, std::int32_t row);

/// Host block that holds `position` of the row's session. Throws StateError naming `block_table` if
/// it is none of the layer's.
std::int32_t host_block_of(const LayerView& layer, const StepView& step, std::int32_t row, std::int32_t position);

/// Host row that holds `position` of the row's session, checked likewise.
std::int32_t host_row_of(const LayerView& layer, const StepView& step, std::int32_t row, std::int32_t position);

}  // namespace echo
