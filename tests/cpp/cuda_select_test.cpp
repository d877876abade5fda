// select on the GPU: the very selection and k-th score of the CPU, whatever the scores are, by the general kernel and
// by the one of clusters, from all scores and from what score sifted.

#include "cuda_pair.hpp"
#include "cuda_select_world.hpp"

namespace echo::cuda_test {
namespace {

using CudaSelect = CudaTest;

/// The CPU, the general kernel and the GPU's own one.
struct Three {
  Three(std::int32_t top_k, const SelectSizes& sizes_)
      : sizes(sizes_),
        backends{make_cpu_backend(2), make_cuda_backend(0, generic_kernels()), make_cuda_backend(0, own_kernels())},
        cpu(*backends[0], top_k, sizes),
        general(*backends[1], top_k, sizes),
        own(*backends[2], top_k, sizes) {}

  template <typename What>
  void write(const What& what) {
    cpu.write(what);
    general.write(what);
    own.write(what);
  }
  void select() {
    cpu.select();
    general.select();
    own.select();
  }
  void expect_same(const char* what, int number) {
    const auto selection = cpu.selection.read();
    const auto kth = cpu.kth_bits();
    ASSERT_EQ(general.selection.read(), selection) << what << number;
    ASSERT_EQ(general.kth_bits(), kth) << what << number;
    ASSERT_EQ(own.selection.read(), selection) << what << number;
    ASSERT_EQ(own.kth_bits(), kth) << what << number;
  }
  void check(ScoredRows rows, int kind) {
    write(rows);
    select();
    expect_same("kind ", kind);
  }
  /// Rows that the GPU's own kernel searched although score had sifted them, and tokens sifted.
  LayerCounters counted() const { return own.counters.read().front(); }

  SelectSizes sizes;
  std::array<std::unique_ptr<Backend>, 3> backends;
  SelectWorld cpu;
  SelectWorld general;
  SelectWorld own;
};

TEST_F(CudaSelect, SelectsLikeTheCpu) {
  for (const std::int32_t k : {1, 31, 32, 33, 64, 200}) {
    Three three(k, {.rows = 10, .table_stride = 20});
    for (int kind = 0; kind < kScoreKinds; ++kind) {
      three.check({three.sizes, {kNone, 0, k - 2, k - 1, k, 255, 256, 1023, 1024, 1279}, kind, 100U + k}, kind);
    }
  }
}

TEST_F(CudaSelect, LongRows) {
  for (const std::int32_t k : {1, 64, 2048, 3001, 4096}) {
    Three three(k, {.rows = 4, .table_stride = 640});
    for (int kind = 0; kind < kScoreKinds; ++kind) {
      three.check({three.sizes, {40959, std::max(8191, k), 33333, std::max(8192, k - 1)}, kind, 7U}, kind);
    }
  }
}

TEST_F(CudaSelect, OneVeryLongRow) {
  for (const std::int32_t tokens : {100'001, 262'144, 1'048'576}) {
    Three three(2048, {.rows = 1, .table_stride = (tokens + kTokensPerBlock - 1) / kTokensPerBlock});
    for (const int kind : {0, 1, 2, 4, 13, 14}) {
      three.check({three.sizes, {tokens - 1}, kind, 11U}, kind);
    }
  }
}

TEST_F(CudaSelect, ManyRows) {
  for (const std::int32_t rows : {13, 20, 40, 102}) {
    Three three(2048, {.rows = rows, .table_stride = 520});
    std::vector<std::int32_t> positions;
    for (std::int32_t row = 0; row < rows; ++row) {
      positions.push_back(row % 7 == 3 ? kNone : 520 * kTokensPerBlock - 1 - 317 * row);
    }
    three.check({three.sizes, positions, 0, 13U}, 0);
    three.check({three.sizes, positions, 12, 13U}, 12);
  }
}

TEST_F(CudaSelect, SiftedTokensDo) {
  for (const std::int32_t k : {64, 2048, 4096}) {
    Three three(k, {.rows = 5, .table_stride = 320, .query_rows = 1, .capacity = 5 * k / 2});
    for (const int kind : {0, 2, 3, 5, 6, 9, 10, 13, 15, 16}) {
      ScoredRows rows(three.sizes, {kNone, k - 2, k - 1, 9999, 20479}, kind, 17U);
      for (const std::int32_t wanted : {k, k + 1, 5 * k / 4, 2 * k, 5 * k / 2 - 1}) {
        const Sifting sifting(rows, three.sizes, static_cast<unsigned>(wanted), [&](int) { return wanted; });
        three.write(rows);
        three.write(sifting);
        three.select();
        three.expect_same("sifted, kind ", kind);
        std::int64_t candidates = 0;
        std::int64_t full = 0;
        for (std::size_t row = 1; row < 5; ++row) {
          const std::int32_t found = sifting.found[row].found;
          candidates += found;
          full += row > 1 && (found < k || found > three.sizes.capacity) ? 1 : 0;
        }
        EXPECT_EQ(three.counted().candidates, candidates) << kind;
        EXPECT_EQ(three.counted().full_selects, full) << kind;
        EXPECT_EQ(three.general.counters.read().front().candidates, 0);
      }
    }
  }
}

TEST_F(CudaSelect, SiftingThatIsIncompleteIsNotUsed) {
  constexpr std::int32_t kK = 512;
  Three three(kK, {.rows = 8, .table_stride = 200, .query_rows = 4, .capacity = 1000});
  ScoredRows rows(three.sizes, std::vector<std::int32_t>(8, 12799), 0, 19U);
  const std::vector<std::int32_t> wanted = {600, 600, 600, kK - 1, 1001, 3000, 600, kK};
  Sifting sifting(rows, three.sizes, 23, [&](int row) { return wanted[static_cast<std::size_t>(row)]; });
  sifting.found[0].compared -= 1;  // a token was not compared with the bound
  sifting.found[1].compared = 0;
  sifting.found[2].candidates = 0;
  three.write(rows);
  three.write(sifting);
  three.select();
  three.expect_same("sifted ", 0);
  EXPECT_EQ(three.counted().full_selects, 6);
  EXPECT_EQ(three.counted().candidates, 3 * 600 + kK - 1 + 1001 + 3000 + 600 + kK);
}

TEST_F(CudaSelect, TheSameBitsEveryTime) {
  constexpr std::int32_t kK = 2048;
  Three three(kK, {.rows = 13, .table_stride = 600});
  for (const int kind : {0, 1, 2}) {
    ScoredRows rows(three.sizes, std::vector<std::int32_t>(13, 38'000), kind, 29U);
    const Sifting sifting(rows, three.sizes, 31, [&](int row) { return row % 3 == 0 ? 0 : kK + 100 * row; });
    three.write(rows);
    three.select();
    const auto expected = three.cpu.selection.read();
    for (int repetition = 0; repetition < 200; ++repetition) {
      if (repetition == 100) {
        three.write(sifting);
      }
      three.own.select();
      ASSERT_EQ(three.own.selection.read(), expected) << "kind " << kind << ", repetition " << repetition;
    }
  }
}

TEST_F(CudaSelect, APartOfAPassWritesItsOwnRows) {
  Three three(8, {.rows = 4});
  ScoredRows rows(three.sizes, {20, 30, 40, 50}, 0, 4U);
  three.write(rows);
  for (SelectWorld* world : {&three.cpu, &three.general, &three.own}) {
    world->selection.write(std::vector<std::int32_t>(32, 1 << 30));
    SelectParams params = world->params();
    params.block = {.first = 1, .count = 2, .tick_offset = 0};
    world->backend.select(params);
  }
  EXPECT_EQ(three.general.selection.read(), three.cpu.selection.read());
  EXPECT_EQ(three.own.selection.read(), three.cpu.selection.read());
}

}  // namespace
}  // namespace echo::cuda_test
