// The CUDA backend around its kernels: memory, control blocks, streams, graphs, commit, errors.

#include "cuda_pair.hpp"

namespace echo::cuda_test {
namespace {

using CudaBackendTest = CudaTest;

TEST_F(CudaBackendTest, PinnedMemoryIsSeenByKernelsAndGivenBack) {
  const auto backend = make_cuda_backend(0, RuntimeConfig{});
  constexpr std::size_t kBytes = (std::size_t{1} << 30) + 4096 * 3 + 16;  // two chunks
  for (int round = 0; round < 2; ++round) {
    const Buffer buffer(backend->host_memory(), kBytes, "pool");
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0U);
    std::byte* alias = buffer.device();
    EXPECT_EQ(backend->host_memory().device_alias(buffer.data() + kBytes - 1), alias + kBytes - 1);
    // A copy across the border of the chunks, both ways.
    const std::size_t border = (std::size_t{1} << 30) - 100;
    std::memset(buffer.data() + border, 7, 200);
    const DeviceArray array(*backend, std::vector<std::byte>(200));
    backend->copy_to_device(array.data(), buffer.data() + border, 200);
    EXPECT_EQ(array.read(), std::vector<std::byte>(200, std::byte{7}));
    backend->fill(array.data(), 9, 200);
    backend->copy_to_host(buffer.data() + border, array.data(), 200);
    EXPECT_EQ(std::count(buffer.data() + border, buffer.data() + border + 200, std::byte{9}), 200);
  }
}

TEST_F(CudaBackendTest, MemoryThatIsNotThereIsRefusedAndNothingBreaks) {
  const auto backend = make_cuda_backend(0, RuntimeConfig{});
  constexpr std::size_t kTooMuch = std::size_t{1} << 60;
  for (MemoryResource* memory : {&backend->device_memory(), &backend->host_memory()}) {
    try {
      const Buffer buffer(*memory, kTooMuch, "slots of layer 3");
      FAIL();
    } catch (const CapacityError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("slots of layer 3", 0), 0U) << error.what();
    }
  }
  const DeviceArray array(*backend, std::vector<std::int32_t>{1, 2, 3});
  EXPECT_EQ(array.read(), (std::vector<std::int32_t>{1, 2, 3}));
  EXPECT_GT(cuda_free_bytes(0), 0);
}

TEST_F(CudaBackendTest, ControlBlocksArriveInOrderHoweverManyAreUnderWay) {
  const auto backend = make_cuda_backend(0, RuntimeConfig{});
  std::vector<std::int32_t> words(700'000);  // more than one staging buffer
  const DeviceArray array(*backend, words);
  for (std::int32_t i = 0; i < 50; ++i) {
    std::ranges::fill(words, i);
    backend->upload_control(array.data(), words.data(), words.size() * sizeof(std::int32_t));
  }
  words.assign(words.size(), -1);  // may be reused at once
  EXPECT_EQ(array.read(), std::vector<std::int32_t>(words.size(), 49));
}

TEST_F(CudaBackendTest, VerbsWantToBePreparedFor) {
  const ShapeView shape = shape_of(RowFormat::fp32);
  const Sizes sizes{.batch = 2};
  const auto cpu = make_cpu_backend(1);
  const auto backend = make_cuda_backend(0, RuntimeConfig{});
  World world(*cpu, shape, sizes);
  const RecallParams params = world.recall_params(world.all_rows());
  EXPECT_THROW(backend->recall(params), StateError);
  const ScratchSizes prepared{.shape = shape,
                              .layers = 1,
                              .rows = 2,
                              .block_rows = 1,
                              .slots = sizes.slots,
                              .host_rows = world.host_rows(),
                              .splits = 4};
  EXPECT_GT(cuda_scratch_bytes(prepared), 0U);
  backend->prepare(prepared);
  EXPECT_THROW(backend->prepare(prepared), StateError);
  EXPECT_THROW(backend->recall(params), InvalidArgument);  // two rows in a block
  ShapeView wide = shape;
  wide.latent_dim = 2048;
  const auto another = make_cuda_backend(0, RuntimeConfig{});
  ScratchSizes too_wide = prepared;
  too_wide.shape = wide;
  EXPECT_THROW(another->prepare(too_wide), NotSupported);
}

/// Scores in `world.scores` select, the selection is recalled.
void select_and_recall(World& world) {
  world.select(world.all_rows());
  world.recall(world.all_rows(), true);
}

TEST_F(CudaBackendTest, AReplayedGraphDoesWhatEagerCallsDo) {
  const ShapeView shape = shape_of(RowFormat::raw);
  const Sizes sizes{.batch = 4};
  Pair pair(shape, sizes);
  std::mt19937 engine(50);
  std::generate(pair.cpu.slab.data(), pair.cpu.slab.data() + pair.cpu.slab.bytes(),
                [&] { return static_cast<std::byte>(engine()); });
  std::memcpy(pair.gpu.slab.data(), pair.cpu.slab.data(), pair.cpu.slab.bytes());
  pair.gpu.begin(1, {kNone, kNone, kNone, kNone});
  const auto replay = pair.gpu_backend->capture([&] { select_and_recall(pair.gpu); });
  for (std::int32_t tick = 2; tick < 30; ++tick) {
    const std::vector<std::int32_t> positions = {tick * 5, kNone, tick, 255};
    const auto scores = normal_floats(4 * 256, static_cast<unsigned>(tick));
    pair.both([&](World& world) {
      world.begin(tick, positions);
      world.scores.write(scores);
    });
    select_and_recall(pair.cpu);
    replay();
    ASSERT_EQ(pair.gpu.recalled_rows(), pair.cpu.recalled_rows());
    pair.expect_same_results();
  }
}

TEST_F(CudaBackendTest, BeginNamesTheOwnersOfBlocksLikeTheCpu) {
  const ShapeView shape = shape_of(RowFormat::raw);
  Pair pair(shape, {.batch = 3, .query_rows = 2, .table_stride = 70});
  for (const std::vector<std::int32_t>& positions : {std::vector<std::int32_t>{63, 64, kNone, kNone, 0, kNone},
                                                     {4478, 4479, 100, 101, 2000, 2001},
                                                     {kNone, kNone, kNone, kNone, kNone, kNone}}) {
    pair.both([&](World& world) { world.begin(1, positions); });
    EXPECT_EQ(pair.gpu.owners.read(), pair.cpu.owners.read());
  }
}

TEST_F(CudaBackendTest, ACaptureThatThrowsLeavesTheBackendUsable) {
  const auto backend = make_cuda_backend(0, RuntimeConfig{});
  EXPECT_THROW(backend->capture([] { throw InvalidArgument("body"); }), InvalidArgument);
  EXPECT_THROW(backend->capture([&] { backend->synchronize(); }), CudaError);
  const DeviceArray array(*backend, std::vector<std::int32_t>{4, 5});
  EXPECT_EQ(array.read(), (std::vector<std::int32_t>{4, 5}));
}

TEST_F(CudaBackendTest, AnotherStreamComesAfterTheFirst) {
  const auto backend = make_cuda_backend(0, RuntimeConfig{});
  std::vector<std::int32_t> words(100'000, 1);
  const DeviceArray array(*backend, words);
  backend->upload_control(array.data(), words.data(), words.size() * 4);
  backend->use_stream(0);
  backend->fill(array.data(), 0, words.size() * 4);
  EXPECT_EQ(array.read(), std::vector<std::int32_t>(words.size(), 0));
}

TEST_F(CudaBackendTest, CommitFoldsLikeTheCpu) {
  const ShapeView shape = shape_of(RowFormat::fp32);
  const Sizes sizes{.batch = 3, .query_rows = 4};
  constexpr std::int32_t kLayers = 5;
  constexpr std::int64_t kStride = 16;
  Pair pair(shape, sizes);
  std::vector<float> thresholds = normal_floats(3 * kLayers, 60);
  std::vector<float> scores = normal_floats(kLayers * kStride, 61);
  for (std::size_t i = 0; i < scores.size(); i += 3) {
    scores[i] = i % 2 == 0 ? NAN : -INFINITY;
  }
  std::vector<float> deviations = normal_floats(3 * kLayers, 62);
  thresholds[4] = thresholds[7] = NAN;
  deviations[4] = deviations[8] = NAN;
  std::vector<std::vector<float>> results;
  pair.both([&](World& world) {
    world.begin(1, {0, 1, 2, 3, kNone, kNone, kNone, kNone, 4, 5, 6, 7});
    const DeviceArray kth(world.backend, scores);
    const DeviceArray kept(world.backend, thresholds);
    const DeviceArray spread(world.backend, deviations);
    world.backend.commit({.step = world.step(),
                          .layers = kLayers,
                          .kth_score = kth.data(),
                          .kth_stride = kStride,
                          .thresholds = kept.data(),
                          .deviations = spread.data(),
                          .alpha = 0.3F});
    results.push_back(kept.read());
    results.push_back(spread.read());
    results.push_back(kth.read());
  });
  for (const std::size_t i : {0U, 1U}) {
    EXPECT_EQ(std::memcmp(results[3 + i].data(), results[i].data(), results[i].size() * sizeof(float)), 0);
  }
  EXPECT_TRUE(std::ranges::all_of(results[5], [](float score) { return std::isnan(score); }));
}

TEST_F(CudaBackendTest, ReleaseOfManyRuns) {
  const ShapeView shape = shape_of(RowFormat::raw);
  const Sizes sizes{.slots = 200, .batch = 4};
  Pair pair(shape, sizes);
  std::vector<std::int32_t> selection(pair.cpu.entries());
  std::iota(selection.begin(), selection.end(), 0);
  pair.both([&](World& world) {
    world.begin(1, {255, 255, 255, 255});
    world.selection.write(selection);
    world.recall(world.all_rows());
    const LayerView layer = world.layer();
    std::vector<RowRun> runs;
    for (std::int32_t row = 0; row + 3 < world.host_rows(); row += 7) {
      runs.push_back({row, 3});
    }
    runs.push_back({0, 200});
    world.backend.release({&layer, 1}, runs);
  });
  pair.expect_same_state();
  const LayerView layer = pair.gpu.layer();
  const RowRun outside[] = {{static_cast<std::int32_t>(layer.host_rows) - 1, 2}};
  EXPECT_THROW(pair.gpu_backend->release({&layer, 1}, outside), InvalidArgument);
  const RowRun everything[] = {{0, static_cast<std::int32_t>(layer.host_rows)}};
  pair.gpu_backend->release({&layer, 1}, everything);
  EXPECT_TRUE(pair.gpu.resident_rows().empty());
  pair.gpu.check();
}

TEST_F(CudaBackendTest, KernelsThatAreNotThereAreRefused) {
  RuntimeConfig config;
  config.kernels = "fast";
  EXPECT_THROW(make_cuda_backend(0, config), InvalidArgument);
}

TEST_F(CudaBackendTest, DevicesThatAreNotThereAreRefused) {
  EXPECT_THROW(make_cuda_backend(4096, RuntimeConfig{}), Error);
  EXPECT_GT(cuda_device_count(), 0);
}

}  // namespace
}  // namespace echo::cuda_test
