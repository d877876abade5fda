// attend on tensor cores (attend_cluster, on Hopper): close to the formula in double with any heads, splits and gaps,
// and to the bit independent of the batch. From the simple to the composed; cuda_mla_stages_test.cu looks inside the
// kernel.

#include <functional>
#include <string>
#include <utility>

#include "cuda_attend.hpp"
#include "reference/row_codec.hpp"

namespace echo::cuda_test {
namespace {

using CudaAttendCluster = CudaTest;

constexpr std::int32_t kManyUsed = 300;

ShapeView wide_shape(RowFormat format, std::int32_t heads, std::int32_t top_k) {
  ShapeView shape = shape_of(format, IndexKeyFormat::fp8, top_k);
  shape.query_heads = heads;
  return shape;
}

/// bf16 values: what the tensor cores get is what the formula gets.
std::vector<float> bf16_floats(std::size_t count, unsigned seed, float spread = 1.0F) {
  std::vector<float> values = normal_floats(count, seed, spread);
  std::ranges::transform(values, values.begin(), [](float value) { return from_bf16(to_bf16(value)); });
  return values;
}

/// One world on the GPU with rows in slots [0, kManyUsed); the rest of the pool is 0xFF, so NaN.
struct Attended {
  Attended(const ShapeView& shape_, std::int32_t batch, std::int32_t splits)
      : shape(shape_),
        cpu_backend(make_cpu_backend(0)),
        backend(make_cuda_backend(0, own_kernels())),
        world(*backend, shape, {.slots = kManyUsed + 100, .batch = batch, .table_stride = 1, .splits = splits}),
        q(bf16_floats(static_cast<std::size_t>(batch) * q_row(), 51)) {
    const auto values = normal_floats(static_cast<std::size_t>(kManyUsed * dim()), 50);
    pool.assign(static_cast<std::size_t>(world.sizes.slots) * static_cast<std::size_t>(row_bytes_of(shape)),
                std::byte{0xFF});
    rows.resize(values.size());
    for (std::int32_t slot = 0; slot < kManyUsed; ++slot) {
      std::byte* row = pool.data() + static_cast<std::ptrdiff_t>(slot) * row_bytes_of(shape);
      encode_row(values.data() + static_cast<std::ptrdiff_t>(slot) * dim(), shape, row);
      decode_row(row, shape, rows.data() + static_cast<std::ptrdiff_t>(slot) * dim());
    }
    world.pool.write(pool);
  }

  std::int32_t dim() const { return shape.latent_dim + shape.rope_dim; }
  std::size_t q_row() const { return static_cast<std::size_t>(shape.query_heads) * static_cast<std::size_t>(dim()); }
  std::size_t out_row() const {
    return static_cast<std::size_t>(shape.query_heads) * static_cast<std::size_t>(shape.latent_dim);
  }

  /// Slots as `present(row, entry)` has them, random ones.
  void select(const std::function<bool(std::int32_t, std::int32_t)>& present, unsigned seed) {
    std::mt19937 engine(seed);
    slots.assign(world.entries(), kNone);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const auto k = static_cast<std::size_t>(shape.top_k);
      if (present(static_cast<std::int32_t>(i / k), static_cast<std::int32_t>(i % k))) {
        slots[i] = static_cast<std::int32_t>(engine() % static_cast<unsigned>(kManyUsed));
      }
    }
    world.slots.write(slots);
  }

  std::vector<float> run(DType q_dtype = DType::f32, DType out_dtype = DType::f32) {
    return q_dtype == DType::f32 ? attend(world, q, DType::f32, out_dtype, world.all_rows(), scale)
                                 : attend(world, upper_halves(q), DType::bf16, out_dtype, world.all_rows(), scale);
  }

  /// The formula in double, of one head.
  std::vector<double> expected(std::int32_t row, std::int32_t head) const {
    const float* query = q.data() + static_cast<std::size_t>(row) * q_row() + static_cast<std::ptrdiff_t>(head) * dim();
    std::vector<std::pair<double, const float*>> entries;
    double most = -std::numeric_limits<double>::infinity();
    for (std::int32_t i = 0; i < shape.top_k; ++i) {
      const std::int32_t slot =
          slots[static_cast<std::size_t>(row) * static_cast<std::size_t>(shape.top_k) + static_cast<std::size_t>(i)];
      if (slot != kNone) {
        const float* values = rows.data() + static_cast<std::ptrdiff_t>(slot) * dim();
        const double logit = static_cast<double>(scale) * std::inner_product(query, query + dim(), values, 0.0);
        entries.emplace_back(logit, values);
        most = std::max(most, logit);
      }
    }
    double sum = 0.0;
    std::vector<double> out(static_cast<std::size_t>(shape.latent_dim), 0.0);
    for (const auto& [logit, values] : entries) {
      const double weight = std::exp(logit - most);
      sum += weight;
      for (std::size_t d = 0; d < out.size(); ++d) {
        out[d] += weight * static_cast<double>(values[d]);
      }
    }
    for (double& value : out) {
      value = entries.empty() ? 0.0 : value / sum;
    }
    return out;
  }

  /// |error| / |expected| of some heads of all rows, each at most `tolerance`.
  void expect_formula(const std::vector<float>& got, double tolerance, const std::string& what) const {
    const std::int32_t step = shape.query_heads > 20 ? 21 : 5;
    for (std::int32_t row = 0; row < world.sizes.rows(); ++row) {
      for (std::int32_t head = row % step; head < shape.query_heads; head += step) {
        const std::vector<double> want = expected(row, head);
        const float* given = got.data() + static_cast<std::size_t>(row) * out_row() +
                             static_cast<std::ptrdiff_t>(head) * shape.latent_dim;
        double error = 0.0;
        double size = 0.0;
        for (std::size_t d = 0; d < want.size(); ++d) {
          const double difference = static_cast<double>(given[d]) - want[d];
          error += difference * difference;
          size += want[d] * want[d];
        }
        // A NaN fails too.
        ASSERT_TRUE(std::sqrt(error) <= tolerance * std::sqrt(size))
            << what << ": row " << row << ", head " << head << ": off by " << std::sqrt(error) << " of "
            << std::sqrt(size) << "; first columns " << given[0] << ", " << given[1] << " instead of " << want[0]
            << ", " << want[1];
      }
    }
  }

  ShapeView shape;
  float scale = 0.07F;
  std::unique_ptr<Backend> cpu_backend;
  std::unique_ptr<Backend> backend;
  World world;
  std::vector<float> q;
  std::vector<std::byte> pool;
  std::vector<float> rows;  ///< decoded
  std::vector<std::int32_t> slots;
};

/// Relative error: what bf16 weights and queries cost, and half a bit of a bf16 output.
double tolerance_of(RowFormat format, DType out = DType::f32) {
  return (format == RowFormat::fp8_656 ? 4e-3 : 2e-3) + (out == DType::bf16 ? 2e-3 : 0.0);
}

const auto kEverything = [](std::int32_t, std::int32_t) { return true; };

TEST_F(CudaAttendCluster, OneSplit) {
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152}) {
    for (const std::int32_t top_k : {64, 128, 192, 512}) {
      Attended attended(wide_shape(format, 64, top_k), 2, 1);
      attended.select(kEverything, 52);
      attended.expect_formula(attended.run(), tolerance_of(format), "k = " + std::to_string(top_k));
    }
  }
}

TEST_F(CudaAttendCluster, ManySplits) {
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

TEST_F(CudaAttendCluster, AnyHeads) {
  for (const std::int32_t heads : {128, 64, 32, 16, 70, 1}) {
    for (const DType out : {DType::f32, DType::bf16}) {
      Attended attended(wide_shape(RowFormat::fp8_656, heads, 512), 5, 4);
      attended.select([](std::int32_t row, std::int32_t entry) { return (row + entry) % 5 != 0; }, 54);
      attended.expect_formula(attended.run(DType::bf16, out), tolerance_of(RowFormat::fp8_656, out),
                              std::to_string(heads) + " heads");
    }
  }
}

TEST_F(CudaAttendCluster, AnyGaps) {
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

TEST_F(CudaAttendCluster, AgreeWithTheOtherKernelAndTheCpu) {
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

TEST_F(CudaAttendCluster, ExtremeLogits) {
  for (const float scale : {20.0F, -3.0F, 0.0F, 1e-30F}) {  // one weight, the smallest logits, all weights alike
    Attended attended(wide_shape(RowFormat::fp8_656, 64, 512), 3, 4);
    attended.scale = scale;
    attended.select([](std::int32_t row, std::int32_t entry) { return row != 2 || entry % 3 == 0; }, 58);
    attended.expect_formula(attended.run(), 4e-3, "scale " + std::to_string(scale));
  }
}

/// Batches of any size, with outputs in f32.
struct Batches {
  static constexpr std::int32_t kMost = 102;

  explicit Batches(std::int32_t splits_)
      : splits(splits_),
        attended(wide_shape(RowFormat::fp8_656, 128, 2048), kMost, splits),
        halves(upper_halves(attended.q)),
        q(*attended.backend, halves),
        out(*attended.backend, std::vector<float>(static_cast<std::size_t>(kMost) * attended.out_row(), NAN)) {
    attended.select([](std::int32_t row, std::int32_t entry) { return (entry * 7 + row) % 11 != 0; }, 59);
  }

  void run(std::int32_t count) {
    attended.backend->attend({.layer = attended.world.layer(),
                              .block = {.first = 0, .count = count, .tick_offset = 0},
                              .shape = attended.shape,
                              .q = q.data(),
                              .q_dtype = DType::bf16,
                              .scale = attended.scale,
                              .slots = attended.world.slots.data(),
                              .out = out.data(),
                              .out_dtype = DType::f32,
                              .splits = splits});
  }
  /// Query `from` at a place of the batch.
  void put(std::size_t from, std::size_t place) {
    Backend& backend = *attended.backend;
    const auto k = static_cast<std::size_t>(attended.shape.top_k);
    backend.copy_to_device(attended.world.slots.data() + place * k, attended.slots.data() + from * k,
                           k * sizeof(std::int32_t));
    backend.copy_to_device(q.data() + place * attended.q_row(), halves.data() + from * attended.q_row(),
                           attended.q_row() * sizeof(std::uint16_t));
  }
  std::vector<float> result(std::size_t place, std::size_t count = 1) {
    std::vector<float> values(count * attended.out_row());
    attended.backend->copy_to_host(values.data(), out.data() + place * attended.out_row(),
                                   values.size() * sizeof(float));
    return values;
  }

  std::int32_t splits;
  Attended attended;
  std::vector<std::uint16_t> halves;
  DeviceArray<std::uint16_t> q;
  DeviceArray<float> out;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// One query alone, then in batches of any size and at any place of them, many times.
TEST_F(CudaAttendCluster, BitsDoNotDependOnTheBatch) {
  for (const std::int32_t splits : {1, 5, 8, 16, 32}) {
    Batches batches(splits);
    constexpr std::size_t kProbe = 37;
    batches.put(kProbe, 0);
    batches.run(1);
    const auto alone = batches.result(0);
    batches.put(0, 0);
    std::mt19937 engine(60);
    const std::vector<std::int32_t> sizes = {1, 2, 7, 8, 13, 32, 64, 102};
    for (int repetition = 0; repetition < 250; ++repetition) {
      const std::int32_t size = sizes[static_cast<std::size_t>(repetition) % sizes.size()];
      const auto place = static_cast<std::size_t>(engine() % static_cast<unsigned>(size));
      batches.put(kProbe, place);
      batches.run(size);
      ASSERT_TRUE(same_bits(batches.result(place), alone))
          << splits << " splits, repetition " << repetition << ", batch " << size << ", place " << place;
      batches.put(place, place);
    }
  }
}

/// Two launches at a time, on streams of their own: neither has all multiprocessors, and blocks of either have to wait
/// for others of their team that have not begun.
TEST_F(CudaAttendCluster, GoOnBesideOtherWork) {
  Batches some(16);
  Batches others(5);
  const std::vector<std::int32_t> sizes = {8, 32, 3, 102, 13, 64};
  const auto all = static_cast<std::size_t>(Batches::kMost);
  some.run(Batches::kMost);
  const auto expected = some.result(0, all);
  others.run(Batches::kMost);
  const auto expected_others = others.result(0, all);
  for (std::size_t repetition = 0; repetition < 50; ++repetition) {
    for (std::size_t i = 0; i < 20; ++i) {
      some.run(sizes[(repetition + i) % sizes.size()]);
      others.run(sizes[(repetition + 2 * i + 1) % sizes.size()]);
    }
    ASSERT_TRUE(same_bits(some.result(0, all), expected)) << "repetition " << repetition;
    ASSERT_TRUE(same_bits(others.result(0, all), expected_others)) << "repetition " << repetition;
  }
}

TEST_F(CudaAttendCluster, ReplayTheSameBits) {
  Attended attended(wide_shape(RowFormat::fp8_656, 128, 512), 20, 5);
  attended.select(kEverything, 61);
  const auto eager = attended.run(DType::bf16);
  World& world = attended.world;
  Backend& backend = *attended.backend;
  const DeviceArray q(backend, upper_halves(attended.q));
  const DeviceArray out(backend, std::vector<float>(eager.size(), NAN));
  backend.synchronize();
  const auto replay = backend.capture([&] {
    for (int i = 0; i < 5; ++i) {
      backend.attend({.layer = world.layer(),
                      .block = world.all_rows(),
                      .shape = world.shape,
                      .q = q.data(),
                      .q_dtype = DType::bf16,
                      .scale = attended.scale,
                      .slots = world.slots.data(),
                      .out = out.data(),
                      .out_dtype = DType::f32,
                      .splits = world.sizes.splits});
    }
  });
  for (int i = 0; i < 20; ++i) {
    replay();
  }
  const auto replayed = out.read();
  EXPECT_EQ(std::memcmp(replayed.data(), eager.data(), eager.size() * sizeof(float)), 0);
}

TEST_F(CudaAttendCluster, ReportBadSlots) {
  Attended attended(wide_shape(RowFormat::fp8_656, 16, 64), 1, 2);
  attended.select(kEverything, 62);
  auto bad = attended.slots;
  bad[7] = attended.world.sizes.slots;
  bad[9] = -2;
  attended.world.slots.write(bad);
  attended.slots[7] = attended.slots[9] = kNone;
  const DeviceArray q(*attended.backend, attended.q);
  const DeviceArray out(*attended.backend, std::vector<float>(attended.out_row(), NAN));
  attended.backend->attend({.layer = attended.world.layer(),
                            .block = attended.world.all_rows(),
                            .shape = attended.shape,
                            .q = q.data(),
                            .q_dtype = DType::f32,
                            .scale = attended.scale,
                            .slots = attended.world.slots.data(),
                            .out = out.data(),
                            .out_dtype = DType::f32,
                            .splits = 2});
  EXPECT_THROW(attended.backend->synchronize(), StateError);
  attended.expect_formula(out.read(), 4e-3, "without the bad slots");
}

}  // namespace
}  // namespace echo::cuda_test
