// Rows with NaN codes that come to a slot are noted, whoever brings them, and attention minds them then.

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "cuda_attended.hpp"

namespace echo::cuda_test {
namespace {

using CudaNanCodes = CudaTest;

constexpr std::byte kNanCode{0x7F};
constexpr std::byte kNegativeNanCode{0xFF};
constexpr std::int32_t kCodes = 512;

std::int32_t noted(const World& world) { return world.replacement.read()[0].nan_codes; }

/// A world of FP8 rows whose codes are 0x7E, the largest, and whose scales and rope elements are bytes of 0x7F.
struct Coded {
  Coded() : backend(make_cuda_backend(0, own_kernels())), world(*backend, shape_of(RowFormat::fp8_656), {.batch = 2}) {
    for (std::int32_t row = 0; row < world.host_rows(); ++row) {
      std::ranges::fill(codes_of(row), std::byte{0x7E});
      std::fill_n(codes_of(row).data() + kCodes, row_bytes_of(world.shape) - kCodes, kNanCode);
    }
  }
  std::span<std::byte> codes_of(std::int32_t host_row) {
    return {world.slab.data() + host_row * (row_bytes_of(world.shape) + World::kHostPadding), kCodes};
  }

  std::unique_ptr<Backend> backend;
  World world;
};

TEST_F(CudaNanCodes, OfRecalledRowsAreNoted) {
  for (const std::int32_t code : {0, 250, 511}) {
    for (const std::byte nan : {kNanCode, kNegativeNanCode}) {
      Coded coded;
      World& world = coded.world;
      coded.codes_of(world.host_row_at(1, 9))[static_cast<std::size_t>(code)] = nan;
      std::vector<std::int32_t> selection(world.entries(), kNone);
      const auto recall = [&](std::int32_t tick, std::int32_t position) {
        const auto k = static_cast<std::ptrdiff_t>(world.shape.top_k);
        std::iota(selection.begin() + k, selection.begin() + k + 4, position);
        world.begin(tick, {40, 40});
        world.selection.write(selection);
        world.recall(world.all_rows());
        world.backend.synchronize();
      };
      recall(1, 10);
      EXPECT_EQ(noted(world), 0) << "bytes that are no codes, or of rows that have no slot";
      recall(2, 6);
      EXPECT_EQ(noted(world), 1) << "code " << code;
      recall(3, 20);
      EXPECT_EQ(noted(world), 1) << "the row is still there";
    }
  }
}

TEST_F(CudaNanCodes, OfNewRowsAreNotedWhereTheyHaveSlots) {
  for (const bool has_nan : {false, true}) {
    for (const bool claims : {false, true}) {
      for (const bool together : {false, true}) {  // by recall, or by append
        Coded coded;
        World& world = coded.world;
        std::vector<float> kv(static_cast<std::size_t>(world.sizes.rows()) * 576, 1.0F);
        kv[530] = std::numeric_limits<float>::quiet_NaN();  // of the rope: no code
        if (has_nan) {
          kv[576 + 300] = std::numeric_limits<float>::quiet_NaN();
        }
        world.begin(1, {40, 41}, claims);
        world.selection.write(std::vector<std::int32_t>(world.entries(), kNone));
        const DeviceArray rows(world.backend, kv);
        const std::vector<float> keys(static_cast<std::size_t>(world.sizes.rows() * world.shape.index_dim), 1.0F);
        if (together) {
          world.append_and_recall(rows, DType::f32, false);
        } else {
          world.append(rows, DType::f32, DeviceArray(world.backend, keys), DType::f32);
        }
        world.backend.synchronize();
        EXPECT_EQ(noted(world), has_nan && claims ? 1 : 0) << has_nan << claims << together;
      }
    }
  }
}

TEST_F(CudaNanCodes, OfEncodedNewRowsAreNoted) {
  for (const std::int32_t at : {kCodes - 1, kCodes}) {
    Coded coded;
    World& world = coded.world;
    std::vector<std::byte> kv(static_cast<std::size_t>(world.sizes.rows() * row_bytes_of(world.shape)));
    kv[static_cast<std::size_t>(at)] = kNegativeNanCode;
    world.begin(1, {40, 41}, true);
    const std::vector<float> keys(static_cast<std::size_t>(world.sizes.rows() * world.shape.index_dim), 1.0F);
    world.append(DeviceArray(world.backend, kv), DType::u8, DeviceArray(world.backend, keys), DType::f32);
    world.backend.synchronize();
    EXPECT_EQ(noted(world), at < kCodes ? 1 : 0) << at;
  }
}

TEST_F(CudaNanCodes, MakeOutputsOfRowsThatSelectThemNan) {
  // 102 rows are more items than teams, which hand some to each other.
  for (const auto& [batch, splits] : {std::pair{5, 1}, {5, 4}, {102, 1}, {102, 4}}) {
    SCOPED_TRACE(std::to_string(batch) + " rows, " + std::to_string(splits) + " splits");
    Attended attended(wide_shape(RowFormat::fp8_656, 128, 512), batch, splits);
    attended.select([](std::int32_t, std::int32_t) { return true; }, 71);
    for (std::int32_t& slot : attended.slots) {
      slot = slot == 17 ? 18 : slot;
    }
    const std::int32_t odd = batch / 2;
    attended.slots[static_cast<std::size_t>(odd * 512 + 130)] = 17;
    attended.world.slots.write(attended.slots);
    const std::vector<float> before = attended.run();
    attended.pool[static_cast<std::size_t>(17) * 656 + 511] = kNanCode;
    attended.world.pool.write(attended.pool);
    ReplacementState state = attended.world.replacement.read()[0];
    state.nan_codes = 1;
    attended.world.replacement.write({state});
    const std::vector<float> after = attended.run();
    const auto size = static_cast<std::ptrdiff_t>(attended.out_row());
    for (std::ptrdiff_t row = 0; row < batch; ++row) {
      const std::span<const float> was(before.data() + row * size, static_cast<std::size_t>(size));
      const std::span<const float> is(after.data() + row * size, static_cast<std::size_t>(size));
      if (row == odd) {
        EXPECT_TRUE(std::ranges::all_of(is, [](float value) { return std::isnan(value); }));
      } else {
        EXPECT_TRUE(std::ranges::equal(was, is)) << "row " << row;
      }
    }
  }
}

}  // namespace
}  // namespace echo::cuda_test
