// append on the GPU writes what the CPU writes, bit for bit: rows, slots and index keys.

#include "cuda_pair.hpp"
#include "kernels/number_formats.hpp"

namespace echo::cuda_test {
namespace {

using CudaAppend = CudaTest;

constexpr RowFormat kFormats[] = {RowFormat::fp8_656, RowFormat::bf16_1152, RowFormat::fp32};
constexpr IndexKeyFormat kKeyFormats[] = {IndexKeyFormat::fp8, IndexKeyFormat::fp32};

std::size_t count(std::int32_t rows, std::int32_t dim) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(dim);
}

TEST_F(CudaAppend, EncodesLikeTheCpu) {
  for (const RowFormat format : kFormats) {
    for (const IndexKeyFormat keys_format : kKeyFormats) {
      for (const bool claims : {false, true}) {
        const ShapeView shape = shape_of(format, keys_format);
        const Sizes sizes{.batch = 3, .query_rows = 3};
        Pair pair(shape, sizes);
        const auto kv = wild_floats(count(sizes.rows(), shape.latent_dim + shape.rope_dim), 1);
        const auto keys = wild_floats(count(sizes.rows(), shape.index_dim), 2);
        pair.both([&](World& world) {
          world.begin(1, {62, 63, 64, kNone, kNone, kNone, 0, 1, 2}, claims);
          world.append(DeviceArray(world.backend, kv), DType::f32, DeviceArray(world.backend, keys), DType::f32);
        });
        pair.expect_same_state();
      }
    }
  }
}

TEST_F(CudaAppend, EncodesBf16LikeTheCpu) {
  for (const RowFormat format : kFormats) {
    const ShapeView shape = shape_of(format);
    const Sizes sizes{.batch = 5, .query_rows = 1};
    Pair pair(shape, sizes);
    const auto kv = upper_halves(wild_floats(count(sizes.rows(), shape.latent_dim + shape.rope_dim), 3));
    const auto keys = upper_halves(wild_floats(count(sizes.rows(), shape.index_dim), 4));
    pair.both([&](World& world) {
      world.begin(7, {5, kNone, 200, 64, 255}, /*claims=*/true);
      world.append(DeviceArray(world.backend, kv), DType::bf16, DeviceArray(world.backend, keys), DType::bf16);
    });
    pair.expect_same_state();
  }
}

TEST_F(CudaAppend, CopiesEncodedRows) {
  const ShapeView shape = shape_of(RowFormat::raw);
  const Sizes sizes{.batch = 4};
  Pair pair(shape, sizes);
  std::vector<std::byte> kv(count(sizes.rows(), row_bytes_of(shape)));
  std::mt19937 engine(5);
  std::ranges::generate(kv, [&] { return static_cast<std::byte>(engine()); });
  const auto keys = normal_floats(count(sizes.rows(), shape.index_dim), 6);
  pair.both([&](World& world) {
    world.begin(3, {10, 11, 63, 0}, /*claims=*/true);
    world.append(DeviceArray(world.backend, kv), DType::u8, DeviceArray(world.backend, keys), DType::f32);
  });
  pair.expect_same_state();
}

TEST_F(CudaAppend, AMappedRowKeepsItsSlotAndIsWrittenToBothPlaces) {
  const ShapeView shape = shape_of(RowFormat::fp32);
  const Sizes sizes{.slots = 7, .batch = 3};
  Pair pair(shape, sizes);
  const struct {
    std::vector<std::int32_t> positions;
    bool claims;
  } passes[] = {{{1, 2, 3}, true}, {{1, 2, 4}, true}, {{2, 3, 4}, true}, {{2, kNone, 5}, false},
                {{2, 3, 5}, true}, {{9, 9, 9}, true}, {{0, 1, 2}, true}, {{0, 1, 2}, false}};
  std::int32_t tick = 0;
  for (const auto& pass : passes) {
    ++tick;
    const auto seed = static_cast<unsigned>(tick);
    const auto kv = normal_floats(count(sizes.rows(), shape.latent_dim + shape.rope_dim), seed);
    const auto keys = normal_floats(count(sizes.rows(), shape.index_dim), seed + 100);
    pair.both([&](World& world) {
      world.begin(tick, pass.positions, pass.claims);
      world.append(DeviceArray(world.backend, kv), DType::f32, DeviceArray(world.backend, keys), DType::f32);
    });
    SCOPED_TRACE(tick);
    pair.expect_same_results();
    const auto new_rows = static_cast<std::int32_t>(3 - std::ranges::count(pass.positions, kNone));
    if (pass.claims) {
      EXPECT_EQ(pair.gpu.resident_new_rows(pass.positions), new_rows);
      EXPECT_EQ(pair.cpu.resident_new_rows(pass.positions), new_rows);
    }
  }
}

TEST_F(CudaAppend, RowsAndIndexKeysMayComeApart) {
  const ShapeView shape = shape_of(RowFormat::fp32);
  const Sizes sizes{.batch = 3};
  Pair pair(shape, sizes);
  const auto kv = normal_floats(count(3, shape.latent_dim + shape.rope_dim), 1);
  const auto keys = normal_floats(count(3, shape.index_dim), 2);
  pair.both([&](World& world) {
    world.begin(1, {5, kNone, 70}, /*claims=*/true);
    const DeviceArray rows(world.backend, kv);
    const DeviceArray index_keys(world.backend, keys);
    AppendParams params{.layer = world.layer(),
                        .step = world.step(),
                        .shape = shape,
                        .kv = nullptr,
                        .kv_dtype = DType::f32,
                        .index_key = index_keys.data(),
                        .index_key_dtype = DType::f32};
    const auto untouched = world.host_pool();
    world.backend.append(params);
    EXPECT_EQ(world.host_pool(), untouched);
    EXPECT_EQ(world.counted().appended, 0);
    const auto written = world.index_keys.read();
    params.kv = rows.data();
    params.index_key = nullptr;
    world.backend.append(params);
    EXPECT_EQ(world.index_keys.read(), written);
    EXPECT_EQ(world.counted().appended, 2);
  });
  pair.expect_same_state();
}

TEST_F(CudaAppend, PositionsOutsideTheCacheAreReportedAndChangeNothing) {
  const ShapeView shape = shape_of(RowFormat::fp32);
  const Sizes sizes{.batch = 3};
  Pair pair(shape, sizes);
  World& world = pair.gpu;
  const auto before = world.host_pool();
  const DeviceArray kv(world.backend, normal_floats(count(3, shape.latent_dim + shape.rope_dim), 1));
  const DeviceArray keys(world.backend, normal_floats(count(3, shape.index_dim), 2));
  world.begin(1, {4 * kTokensPerBlock, -2, 1 << 30}, /*claims=*/true);
  world.append(kv, DType::f32, keys, DType::f32);
  EXPECT_THROW(world.backend.synchronize(), StateError);
  world.backend.synchronize();  // reported once
  EXPECT_EQ(world.host_pool(), before);
  EXPECT_TRUE(world.resident_rows().empty());
  world.check();
}

}  // namespace
}  // namespace echo::cuda_test
