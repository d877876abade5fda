// attend on the GPU: close to the CPU's, in every format, and to the bit independent of the batch. These shapes take
// the kernel for any GPU: their top_k is no multiple of 64.

#include "cuda_attend.hpp"

namespace echo::cuda_test {
namespace {

using CudaAttend = CudaTest;

/// Rows in the slots of both worlds, through append on the CPU; slots not in use stay 0xFF.
void fill_slots(Pair& pair, std::int32_t used, unsigned seed) {
  const ShapeView& shape = pair.cpu.shape;
  const auto dim = static_cast<std::size_t>(shape.latent_dim + shape.rope_dim);
  const Sizes one{.slots = used, .batch = used, .table_stride = 1};
  World source(*pair.cpu_backend, shape, one);
  const auto kv = normal_floats(static_cast<std::size_t>(used) * dim, seed);
  const auto keys = normal_floats(static_cast<std::size_t>(used * shape.index_dim), seed);
  source.begin(1, std::vector<std::int32_t>(static_cast<std::size_t>(used), 0), /*claims=*/true);
  source.append(DeviceArray(source.backend, kv), DType::f32, DeviceArray(source.backend, keys), DType::f32);
  auto rows = source.pool.read();
  rows.resize(pair.cpu.pool.size(), std::byte{0xFF});
  pair.both([&](World& world) { world.pool.write(rows); });
}

/// Slots with gaps; row 0 has none, row 1 only one.
std::vector<std::int32_t> random_slots(const World& world, std::int32_t used, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<std::int32_t> slots(world.entries(), kNone);
  const auto k = static_cast<std::size_t>(world.shape.top_k);
  for (std::size_t i = 2 * k; i < slots.size(); ++i) {
    if (engine() % 4 != 0) {
      slots[i] = static_cast<std::int32_t>(engine() % static_cast<unsigned>(used));
    }
  }
  slots[2 * k - 1] = 3;
  return slots;
}

constexpr std::int32_t kUsed = 30;

TEST_F(CudaAttend, AgreesWithTheCpu) {
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152, RowFormat::fp32}) {
    for (const std::int32_t splits : {1, 3, 4, 64}) {
      const ShapeView shape = shape_of(format, IndexKeyFormat::fp8, 50);
      Pair pair(shape, {.batch = 4, .splits = splits});
      fill_slots(pair, kUsed, 30);
      const auto slots = random_slots(pair.cpu, kUsed, 31);
      pair.both([&](World& world) { world.slots.write(slots); });
      const auto q =
          normal_floats(static_cast<std::size_t>(4 * shape.query_heads * (shape.latent_dim + shape.rope_dim)), 32);
      const auto expected = attend(pair.cpu, q, DType::f32, DType::f32, pair.cpu.all_rows());
      const auto got = attend(pair.gpu, q, DType::f32, DType::f32, pair.gpu.all_rows());
      expect_close(got, expected, 1e-5F);
      EXPECT_EQ(std::ranges::count(got, 0.0F),
                shape.query_heads * shape.latent_dim);  // row 0 selects nothing
    }
  }
}

TEST_F(CudaAttend, WideLatentsAndBf16) {
  ShapeView shape = shape_of(RowFormat::fp32, IndexKeyFormat::fp8, 20);
  shape.latent_dim = 784;
  Pair pair(shape, {.batch = 3});
  fill_slots(pair, kUsed, 33);
  const auto slots = random_slots(pair.cpu, kUsed, 34);
  pair.both([&](World& world) { world.slots.write(slots); });
  const auto q = upper_halves(normal_floats(static_cast<std::size_t>(3 * shape.query_heads * 800), 35));
  const auto expected = attend(pair.cpu, q, DType::bf16, DType::bf16, pair.cpu.all_rows());
  const auto got = attend(pair.gpu, q, DType::bf16, DType::bf16, pair.gpu.all_rows());
  expect_close(got, expected, 2e-2F);
}

TEST_F(CudaAttend, BitsDoNotDependOnTheBatch) {
  const ShapeView shape = shape_of(RowFormat::fp8_656, IndexKeyFormat::fp8, 40);
  Pair pair(shape, {.batch = 70});  // more rows than fit one launch
  fill_slots(pair, kUsed, 36);
  World& world = pair.gpu;
  const auto k = static_cast<std::size_t>(shape.top_k);
  auto slots = random_slots(world, kUsed, 37);
  auto q = normal_floats(static_cast<std::size_t>(70 * shape.query_heads * 576), 38);
  const auto q_row = static_cast<std::size_t>(shape.query_heads * 576);
  std::copy_n(slots.begin() + 2 * static_cast<std::ptrdiff_t>(k), k,
              slots.begin() + 69 * static_cast<std::ptrdiff_t>(k));
  std::copy_n(q.begin() + 2 * static_cast<std::ptrdiff_t>(q_row), q_row,
              q.begin() + 69 * static_cast<std::ptrdiff_t>(q_row));
  world.slots.write(slots);
  const auto all = attend(world, q, DType::f32, DType::f32, world.all_rows());
  const auto outputs = static_cast<std::size_t>(shape.query_heads * shape.latent_dim);
  EXPECT_EQ(std::memcmp(all.data() + 2 * outputs, all.data() + 69 * outputs, outputs * sizeof(float)), 0);
  // Alone, as a block of the pass.
  std::vector<std::int32_t> alone(slots.begin() + 69 * static_cast<std::ptrdiff_t>(k), slots.end());
  alone.resize(slots.size(), kNone);
  world.slots.write(alone);
  const auto one = attend(world, q, DType::f32, DType::f32, {.first = 69, .count = 1, .tick_offset = 0});
  EXPECT_EQ(std::memcmp(one.data() + 69 * outputs, all.data() + 69 * outputs, outputs * sizeof(float)), 0);
}

TEST_F(CudaAttend, SlotsOutsideThePoolAreLeftOutAndReported) {
  const ShapeView shape = shape_of(RowFormat::fp32);
  Pair pair(shape, {.slots = 8, .batch = 1});
  World& world = pair.gpu;
  std::vector<std::int32_t> slots(world.entries(), kNone);
  slots[0] = 8;
  slots[1] = -5;
  world.slots.write(slots);
  const auto q = normal_floats(static_cast<std::size_t>(shape.query_heads * 64), 39);
  attend(world, q, DType::f32, DType::f32, world.all_rows());
  EXPECT_THROW(world.backend.synchronize(), StateError);
}

}  // namespace
}  // namespace echo::cuda_test
