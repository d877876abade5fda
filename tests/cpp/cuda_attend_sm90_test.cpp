// attend on tensor cores (attend_sm90, on Hopper): close to the formula in double with any heads, splits and gaps.
// From the simple to the composed; cuda_mla_stages_test.cu looks inside the kernel, cuda_attend_bits_test.cpp at bits.

#include <string>

#include "cuda_attended.hpp"

namespace echo::cuda_test {
namespace {

using CudaAttendSm90 = CudaTest;

TEST_F(CudaAttendSm90, OneSplit) {
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152}) {
    for (const std::int32_t top_k : {64, 128, 192, 512}) {
      Attended attended(wide_shape(format, 64, top_k), 2, 1);
      attended.select(kEverything, 52);
      attended.expect_formula(attended.run(), tolerance_of(format), "k = " + std::to_string(top_k));
    }
  }
}

TEST_F(CudaAttendSm90, ManySplits) {
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152}) {
    for (const std::int32_t splits : {2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 21, 32}) {
      for (const std::int32_t top_k : {64, 320, 1024, 2048}) {
        Attended attended(wide_shape(format, 64, top_k), 3, splits);
        attended.select(kEverything, 53);
        attended.expect_formula(attended.run(), tolerance_of(format),
                                std::to_string(splits) + " splits, k = " + std::to_string(top_k));
      }
    }
  }
}

TEST_F(CudaAttendSm90, AnyHeads) {
  for (const std::int32_t heads : {128, 64, 32, 16, 70, 1}) {
    for (const DType out : {DType::f32, DType::bf16}) {
      Attended attended(wide_shape(RowFormat::fp8_656, heads, 512), 5, 4);
      attended.select([](std::int32_t row, std::int32_t entry) { return (row + entry) % 5 != 0; }, 54);
      attended.expect_formula(attended.run(DType::bf16, out), tolerance_of(RowFormat::fp8_656, out),
                              std::to_string(heads) + " heads");
    }
  }
}

TEST_F(CudaAttendSm90, AnyGaps) {
  constexpr std::int32_t kTopK = 1024;
  const std::vector<std::int32_t> lengths = {0, 1, 2, 63, 64, 65, 127, 128, 129, 500, 1023, 1024};
  const auto batch = static_cast<std::int32_t>(lengths.size());
  std::mt19937 engine(55);
  const std::vector<std::pair<std::string, std::function<bool(std::int32_t, std::int32_t)>>> patterns = {
      {"lengths", [&](std::int32_t row, std::int32_t entry) { return entry < lengths[static_cast<std::size_t>(row)]; }},
      {"lengths from the end",
       [&](std::int32_t row, std::int32_t entry) { return entry >= kTopK - lengths[static_cast<std::size_t>(row)]; }},
      {"one entry", [&](std::int32_t row, std::int32_t entry) { return entry == 97 * row % kTopK; }},
      {"half at random", [&](std::int32_t, std::int32_t) { return engine() % 2 == 0; }},
      {"one half of each tile", [&](std::int32_t row, std::int32_t entry) { return entry / 64 % 2 == row % 2; }},
      {"every third tile", [&](std::int32_t row, std::int32_t entry) { return entry / 128 % 3 == row % 3; }}};
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152}) {
    for (const std::int32_t splits : {1, 4, 5, 8, 16, 32}) {
      Attended attended(wide_shape(format, 16, kTopK), batch, splits);
      for (const auto& [name, present] : patterns) {
        attended.select(present, 56);
        const auto got = attended.run();
        attended.expect_formula(got, tolerance_of(format), name + ", " + std::to_string(splits) + " splits");
        if (name == "lengths") {
          EXPECT_TRUE(std::all_of(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(attended.out_row()),
                                  [](float value) { return value == 0.0F; }));
        }
      }
    }
  }
}

TEST_F(CudaAttendSm90, AgreeWithTheOtherKernelAndTheCpu) {
  const ShapeView shape = wide_shape(RowFormat::fp8_656, 128, 640);
  const auto outputs = [&](std::int32_t splits) {
    Attended attended(shape, 3, splits);
    attended.select([](std::int32_t row, std::int32_t entry) { return entry % (row + 2) != 0; }, 57);
    return attended.run();
  };
  constexpr std::int32_t kOthers = 40;  // more than a team can have
  const auto other = outputs(kOthers);
  expect_close(outputs(4), other, 5e-3F);
  Attended attended(shape, 3, kOthers);
  attended.select([](std::int32_t row, std::int32_t entry) { return entry % (row + 2) != 0; }, 57);
  World cpu(*attended.cpu_backend, shape, attended.world.sizes);
  cpu.pool.write(attended.pool);
  cpu.slots.write(attended.slots);
  expect_close(other, attend(cpu, attended.q, DType::f32, DType::f32, cpu.all_rows()), 1e-5F);
}

TEST_F(CudaAttendSm90, ExtremeLogits) {
  for (const float scale : {20.0F, -3.0F, 0.0F, 1e-30F}) {  // one weight, the smallest logits, all weights alike
    Attended attended(wide_shape(RowFormat::fp8_656, 64, 512), 3, 4);
    attended.scale = scale;
    attended.select([](std::int32_t row, std::int32_t entry) { return row != 2 || entry % 3 == 0; }, 58);
    attended.expect_formula(attended.run(), 4e-3, "scale " + std::to_string(scale));
  }
}

TEST_F(CudaAttendSm90, ReportBadSlots) {
  for (const std::int32_t rows : {1, 90}) {
    Attended attended(wide_shape(RowFormat::fp8_656, 128, 512), rows, rows == 1 ? 2 : 1);
    attended.select(kEverything, 62);
    auto bad = attended.slots;
    for (std::size_t i = 7; i + 2 < bad.size(); i += 200) {
      bad[i] = attended.world.sizes.slots;
      bad[i + 2] = -2;
      attended.slots[i] = attended.slots[i + 2] = kNone;
    }
    attended.world.slots.write(bad);
    Launches launches(attended);
    launches.run(0, rows);
    EXPECT_THROW(attended.backend->synchronize(), StateError);
    attended.expect_formula(launches.out.read(), 4e-3, "without the bad slots");
  }
}

}  // namespace
}  // namespace echo::cuda_test
