// attend on tensor cores (attend_sm90, on Hopper): the same bits in any batch, at any place of it, whoever else uses
// the GPU, and however items are dealt out to blocks.

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>

#include "cuda_attended.hpp"

namespace echo::cuda_test {
namespace {

using CudaAttendSm90 = CudaTest;

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// One query alone, then in batches of any size and at any place of them, many times.
TEST_F(CudaAttendSm90, BitsDoNotDependOnTheBatch) {
  for (const std::int32_t splits : {1, 5, 8, 16, 32}) {
    constexpr std::int32_t kBatch = 102;
    Attended attended(wide_shape(RowFormat::fp8_656, 128, 2048), kBatch, splits);
    attended.select([](std::int32_t row, std::int32_t entry) { return (entry * 7 + row) % 11 != 0; }, 59);
    Launches launches(attended);
    const auto k = static_cast<std::size_t>(attended.shape.top_k);
    const auto put = [&](std::size_t from, std::size_t place) {
      Backend& backend = *attended.backend;
      backend.copy_to_device(attended.world.slots.data() + place * k, attended.slots.data() + from * k,
                             k * sizeof(std::int32_t));
      backend.copy_to_device(launches.q.data() + place * attended.q_row(),
                             launches.halves.data() + from * attended.q_row(),
                             attended.q_row() * sizeof(std::uint16_t));
    };
    constexpr std::size_t kProbe = 37;
    put(kProbe, 0);
    launches.run(0, 1);
    const auto alone = launches.result(0, 1);
    put(0, 0);
    std::mt19937 engine(60);
    const std::vector<std::int32_t> sizes = {1, 2, 7, 8, 13, 32, 64, 102};
    for (int repetition = 0; repetition < 500; ++repetition) {
      const std::int32_t size = sizes[static_cast<std::size_t>(repetition) % sizes.size()];
      const auto place = static_cast<std::size_t>(engine() % static_cast<unsigned>(size));
      put(kProbe, place);
      launches.run(0, size);
      ASSERT_TRUE(same_bits(launches.result(place, 1), alone))
          << splits << " splits, repetition " << repetition << ", batch " << size << ", place " << place;
      put(place, place);
    }
  }
}

/// Two launches at a time, on streams of their own: neither has all multiprocessors, and blocks of either have to wait
/// for others of their team that have not begun. One runtime's are launched early, as behind a recall.
TEST_F(CudaAttendSm90, GoOnBesideOtherWork) {
  constexpr std::int32_t kMost = 102;
  Attended some(wide_shape(RowFormat::fp8_656, 128, 2048), kMost, 16);
  Attended others(wide_shape(RowFormat::fp8_656, 128, 2048), kMost, 5);
  some.select(kEverything, 66);
  others.select(kEverything, 67);
  Launches launches(some);
  Launches beside(others);
  launches.run(0, kMost);
  const auto expected = launches.result(0, kMost);
  beside.run(0, kMost);
  const auto expected_beside = beside.result(0, kMost);
  some.backend->unbroken(true);
  const std::vector<std::int32_t> sizes = {8, 32, 3, 102, 13, 64};
  for (std::size_t repetition = 0; repetition < 50; ++repetition) {
    for (std::size_t i = 0; i < 20; ++i) {
      launches.run(0, sizes[(repetition + i) % sizes.size()]);
      beside.run(0, sizes[(repetition + 2 * i + 1) % sizes.size()]);
    }
    ASSERT_TRUE(same_bits(launches.result(0, kMost), expected)) << "repetition " << repetition;
    ASSERT_TRUE(same_bits(beside.result(0, kMost), expected_beside)) << "repetition " << repetition;
  }
  some.backend->unbroken(false);
}

/// Rows of any lengths and with any gaps: whole selections, beginnings, ends, most tiles or halves empty, nothing.
void select_anything(Attended& attended, unsigned seed) {
  const std::int32_t k = attended.shape.top_k;
  std::mt19937 engine(seed);
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(attended.world.sizes.rows()));
  for (std::int32_t& length : lengths) {
    length = static_cast<std::int32_t>(engine() % static_cast<unsigned>(k + 1));
  }
  attended.select(
      [&](std::int32_t row, std::int32_t entry) {
        const std::int32_t length = lengths[static_cast<std::size_t>(row)];
        switch (row % 6) {
          case 0:
            return true;
          case 1:
            return entry < length;
          case 2:
            return entry >= length;
          case 3:
            return entry / 64 % 5 == length % 5;
          case 4:
            return entry == length;
          default:
            return false;
        }
      },
      seed + 1);
}

/// What each row gives alone, then all of them in batches of more items than teams, most of which two teams do.
/// Two other runtimes' attentions run beside them, so that teams begin at any time and in any order.
TEST_F(CudaAttendSm90, HandedOverTheSameBits) {
  constexpr std::int32_t kRows = 140;
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152}) {
    for (const std::int32_t splits : {1, 2, 4, 5, 8}) {
      const std::int32_t repetitions = format == RowFormat::fp8_656 && splits == 1 ? 400 : 40;
      Attended attended(wide_shape(format, 128, splits == 8 ? 832 : 2048), kRows, splits);
      select_anything(attended, 63);
      Launches launches(attended);
      for (std::int32_t row = 0; row < kRows; ++row) {
        launches.run(row, 1);
      }
      const auto alone = launches.result(0, kRows);
      Attended others[] = {{wide_shape(RowFormat::fp8_656, 128, 512), 70, 1},
                           {wide_shape(RowFormat::fp8_656, 64, 128), 9, 4}};
      std::vector<std::unique_ptr<Launches>> beside;
      for (Attended& other : others) {
        other.select(kEverything, 64);
        beside.push_back(std::make_unique<Launches>(other));
      }
      std::mt19937 engine(65);
      for (std::int32_t repetition = 0; repetition < repetitions; ++repetition) {
        const auto size =
            static_cast<std::int32_t>(140 - (repetition < 4 ? static_cast<unsigned>(repetition) : engine() % 74));
        for (const auto& other : beside) {
          for (unsigned i = repetition % 2 == 0 ? 0 : engine() % 5; i > 0; --i) {
            other->run(0, other->attended.world.sizes.rows());
          }
        }
        launches.run(0, size);
        // One of the first rows and of the last, and all of them now and then.
        const auto first = repetition % 10 == 0 ? 0 : engine() % static_cast<unsigned>(size);
        const auto count = repetition % 10 == 0 ? static_cast<std::size_t>(size) : 1;
        const auto got = launches.result(first, count);
        ASSERT_EQ(std::memcmp(got.data(), alone.data() + first * attended.out_row(), got.size() * sizeof(float)), 0)
            << splits << " splits, repetition " << repetition << ", batch " << size << ", from row " << first;
      }
    }
  }
}

TEST_F(CudaAttendSm90, ReplayTheSameBits) {
  for (const std::int32_t rows : {20, 90}) {  // with 90, teams hand over
    Attended attended(wide_shape(RowFormat::fp8_656, 128, 512), rows, rows == 20 ? 5 : 1);
    attended.select(kEverything, 61);
    const auto eager = attended.run(DType::bf16);
    Launches launches(attended);
    attended.backend->synchronize();
    const auto replay = attended.backend->capture([&] {
      for (int i = 0; i < 5; ++i) {
        launches.run(0, rows);
      }
    });
    for (int i = 0; i < 20; ++i) {
      replay();
    }
    const auto replayed = launches.out.read();
    EXPECT_EQ(std::memcmp(replayed.data(), eager.data(), eager.size() * sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace echo::cuda_test
