// append: all is checked first, then bytes are written, rows in parallel.
#include "reference/append.hpp"

#include <vector>

#include "reference/float_io.hpp"
#include "reference/index_keys.hpp"
#include "reference/new_rows.hpp"

namespace echo {
namespace {

void write_index_keys(ThreadPool& pool, const AppendParams& params, const std::vector<NewRow>& rows) {
  const std::int64_t dim = params.shape.index_dim;
  pool.parallel_for(static_cast<std::int64_t>(rows.size()), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> values(static_cast<std::size_t>(dim));
    for (std::int64_t i = begin; i < end; ++i) {
      const NewRow& target = rows[static_cast<std::size_t>(i)];
      load_floats(params.index_key, params.index_key_dtype, target.row * dim, dim, values.data());
      std::byte* block =
          row_address(params.layer.index_keys, target.host_row / kTokensPerBlock, params.layer.index_block_bytes);
      encode_index_key(values.data(), params.shape, block, target.host_row % kTokensPerBlock);
    }
  });
}

}  // namespace

void append_rows(ThreadPool& pool, const AppendParams& params) {
  const std::vector<NewRow> rows = new_rows(params.layer, params.step);
  if (params.kv != nullptr) {
    write_rows(pool, params.layer, params.shape, params.kv, params.kv_dtype, rows);
  }
  if (params.index_key != nullptr) {
    write_index_keys(pool, params, rows);
  }
}

}  // namespace echo
