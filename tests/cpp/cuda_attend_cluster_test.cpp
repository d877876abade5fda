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

/// Launches for some rows of a world, without waiting for them.
struct Launches {
  explicit Launches(Attended& attended_)
      : attended(attended_),
        halves(upper_halves(attended.q)),
        q(*attended.backend, halves),
        out(*attended.backend, std::vector<float>(halves.size() / attended.q_row() * attended.out_row(), NAN)) {}

  void run(std::int32_t first, std::int32_t count) {
    World& world = attended.world;
    attended.backend->attend({.layer = world.layer(),
                              .block = {.first = first, .count = count, .tick_offset = 0},
                              .shape = world.shape,
                              .q = q.data(),
                              .q_dtype = DType::bf16,
                              .scale = attended.scale,
                              .slots = world.slots.data() + static_cast<std::ptrdiff_t>(first) * world.shape.top_k,
                              .out = out.data(),
                              .out_dtype = DType::f32,
                              .splits = world.sizes.splits});
  }
  std::vector<float> result(std::size_t first, std::size_t count) {
    std::vector<float> values(count * attended.out_row());
    attended.backend->copy_to_host(values.data(), out.data() + first * attended.out_row(),
                                   values.size() * sizeof(float));
    return values;
  }

  Attended& attended;
  std::vector<std::uint16_t> halves;
  DeviceArray<std::uint16_t> q;
  DeviceArray<float> out;
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
    for (const std::int32_t splits : {2, 4, 8}) {
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
    for (const std::int32_t splits : {1, 4, 8}) {
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
  const auto other = outputs(3);
  expect_close(outputs(4), other, 5e-3F);
  Attended attended(shape, 3, 3);
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

/// One query alone, then in batches of any size and at any place of them, many times.
TEST_F(CudaAttendCluster, BitsDoNotDependOnTheBatch) {
  const ShapeView shape = wide_shape(RowFormat::fp8_656, 128, 2048);
  constexpr std::int32_t kBatch = 102;
  Attended attended(shape, kBatch, 8);
  attended.select([](std::int32_t row, std::int32_t entry) { return (entry * 7 + row) % 11 != 0; }, 59);
  Backend& backend = *attended.backend;
  Launches launches(attended);
  const auto k = static_cast<std::size_t>(shape.top_k);
  const auto put = [&](std::size_t from, std::size_t place) {
    backend.copy_to_device(attended.world.slots.data() + place * k, attended.slots.data() + from * k,
                           k * sizeof(std::int32_t));
    backend.copy_to_device(launches.q.data() + place * attended.q_row(),
                           launches.halves.data() + from * attended.q_row(), attended.q_row() * sizeof(std::uint16_t));
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
    const auto got = launches.result(place, 1);
    ASSERT_EQ(std::memcmp(got.data(), alone.data(), got.size() * sizeof(float)), 0)
        << "repetition " << repetition << ", batch " << size << ", place " << place;
    put(place, place);
  }
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

/// What each row gives alone, then all of them in batches of more items than clusters, most of which two clusters do.
/// Two other runtimes' attentions run beside them, so that clusters begin at any time and in any order.
TEST_F(CudaAttendCluster, HandedOverTheSameBits) {
  constexpr std::int32_t kRows = 140;
  for (const RowFormat format : {RowFormat::fp8_656, RowFormat::bf16_1152}) {
    for (const std::int32_t splits : {1, 2, 4, 8}) {
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

TEST_F(CudaAttendCluster, ReplayTheSameBits) {
  for (const std::int32_t rows : {20, 90}) {  // with 90, clusters hand over
    Attended attended(wide_shape(RowFormat::fp8_656, 128, 512), rows, rows == 20 ? 4 : 1);
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

TEST_F(CudaAttendCluster, ReportBadSlots) {
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
