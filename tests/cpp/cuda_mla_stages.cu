#include "cuda_mla_stages.hpp"

#include <cmath>
#include <cstring>
#include <iterator>
#include <random>

#include "kernels/cuda_check.hpp"
#include "kernels/mla_attend.cuh"
#include "kernels/mla_gather.cuh"
#include "kernels/mla_whole.cuh"
#include "kernels/number_formats.hpp"

namespace echo::mla_stages {
namespace {

using namespace mla;

/// What a stage leaves behind.
struct Dump {
  std::byte* rows;         ///< [halves, kMatrixBytes]
  std::uint64_t* entries;  ///< [halves]
  float* logits;           ///< [halves, kHeads, kHalf]
  float* out;              ///< [kHeads, kLatent]
  float* references;       ///< [halves, kHeads]
  float* sums;             ///< [halves, kHeads]
};

__device__ void dump_rows(const Dump& dump, Shared& shared) {
  shared.full[0].wait(0);
  shared.full[1].wait(0);
  for (std::uint32_t i = threadIdx.x; i < 2 * kMatrixBytes; i += kConsumers) {
    dump.rows[i] = shared.rows[0][i];
  }
  if (threadIdx.x < kHalves) {
    dump.entries[threadIdx.x] = shared.entries[threadIdx.x];
  }
}

__device__ void dump_logits(const Dump& dump, std::uint32_t group, Shared& shared) {
  shared.full[group].wait(0);
  float logits[kLogits];
  start_logits(shared, group, logits);
  ptx::wgmma_wait<0>();
  ptx::pin(logits);
  for (int i = 0; i < kLogits; ++i) {
    const std::uint32_t head = first_head() + 8 * static_cast<std::uint32_t>(head_of(i));
    const int column = i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
    dump.logits[(group * kHeads + head) * kHalf + column] = logits[i];
  }
}

template <bool kWhole>
__device__ void dump_sums(const Dump& dump, std::uint32_t group, std::int32_t tiles, Shared& shared) {
  Attention attention;
  for (std::int32_t tile = 0; tile < tiles; ++tile) {
    attend_tile<kWhole>(kScale * 1.44269504F, group, static_cast<std::uint32_t>(tile) & 1U, shared, attention);
  }
  const float sums[2] = {sum_of_head(attention.sum[0]), sum_of_head(attention.sum[1])};
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t head = first_head() + 8 * static_cast<std::uint32_t>(i);
    dump.references[group * kHeads + head] = attention.reference[i];
    dump.sums[group * kHeads + head] = sums[i];
  }
  for (int i = 0; i < kOutputs; ++i) {
    const std::uint32_t head = first_head() + 8 * static_cast<std::uint32_t>(head_of(i));
    const std::uint32_t column =
        group * kColumns + static_cast<std::uint32_t>(i / 4 * 8 + lane_index() % 4 * 2 + i % 2);
    dump.out[head * kLatent + column] = attention.out[i];
  }
}

template <RowFormat kFormat, bool kWhole, Stage kStage>
__global__ __launch_bounds__(kThreads, 1) void run_stage(const __grid_constant__ AttendParams p, KernelErrorView errors,
                                                         Dump dump) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const std::int32_t tiles = tiles_of(p.shape.top_k, 1);
  const Work work{.rows = 1,
                  .deal = {.items = 1, .tiles = tiles, .teams = 1, .each = 1, .quota = tiles, .rest = 0},
                  .part_of_rows = 0,  // divisions by 1
                  .part_of_splits = 0};
  const Split split(p, work, 0);
  if (threadIdx.x == 0) {
    for (int half = 0; half < kHalves; ++half) {
      shared.full[half].init(kFullArrivals<kWhole>);
      shared.empty[half].init(kConsumers / kWarp);
    }
    shared.stretch = work.deal.stretch(0);
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    ptx::give_registers<kGatherRegisters<kFormat>>();
    if constexpr (kWhole) {
      gather_whole(p, work, split, shared.stretch, shared, errors);
    } else {
      gather<kFormat>(p, work, split, shared.stretch, shared, errors);
    }
  } else {
    ptx::take_registers<kConsumerRegisters<kFormat>>();
    const std::uint32_t group = __shfl_sync(kAllLanes, threadIdx.x / kGroup, 0);
    load_query(p, 0, 0, shared);
    ptx::wait_copies();
    ptx::fence_proxy_async();
    meet_aligned(kConsumersBarrier, kConsumers);
    if constexpr (kStage == Stage::rows) {
      dump_rows(dump, shared);
    } else if constexpr (kStage == Stage::logits) {
      dump_logits(dump, group, shared);
    } else {
      dump_sums<kWhole>(dump, group, tiles, shared);
    }
  }
#endif
}

template <typename T>
struct DeviceCopy {
  explicit DeviceCopy(const std::vector<T>& values) : count(values.size()) {
    ECHO_CUDA_CHECK(cudaMalloc(&data, count * sizeof(T)));
    ECHO_CUDA_CHECK(cudaMemcpy(data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceCopy() { cudaFree(data); }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  T* data = nullptr;
  std::size_t count;
};

template <typename T>
std::vector<T> read(const DeviceCopy<T>& copy) {
  std::vector<T> values(copy.count);
  ECHO_CUDA_CHECK(cudaMemcpy(values.data(), copy.data, copy.count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

std::uint32_t word_at(const std::vector<std::byte>& bytes, std::size_t at) {
  std::uint32_t word = 0;
  std::memcpy(&word, bytes.data() + at, sizeof word);
  return word;
}

template <Stage kStage>
Result run_case(const Case& input, bool whole) {
  const DeviceCopy pool(input.pool);
  const DeviceCopy slots(input.slots);
  const DeviceCopy q(input.q);
  const DeviceCopy rows(std::vector<std::byte>(2 * kMatrixBytes, std::byte{0xEE}));
  const DeviceCopy entries(std::vector<std::uint64_t>(kHalves, 0xEE));
  const DeviceCopy logits(std::vector<float>(kHalves * kHeads * kHalf, NAN));
  const DeviceCopy out(std::vector<float>(kHeads * kLatent, NAN));
  const DeviceCopy references(std::vector<float>(kHalves * kHeads, NAN));
  const DeviceCopy sums(std::vector<float>(kHalves * kHeads, NAN));
  AttendParams p{};
  p.layer.pool = pool.data;
  p.layer.slots = kSlots;
  p.layer.row_bytes = input.row_bytes();
  p.shape.query_heads = kHeads;
  p.shape.latent_dim = kLatent;
  p.shape.rope_dim = kRope;
  p.shape.top_k = static_cast<std::int32_t>(input.slots.size());
  p.shape.row_format = input.format;
  p.block = {.first = 0, .count = 1, .tick_offset = 0};
  p.q = q.data;
  p.q_dtype = DType::bf16;
  p.slots = slots.data;
  p.splits = 1;
  const KernelErrors errors;
  const auto kernel = input.format == RowFormat::bf16_1152 ? run_stage<RowFormat::bf16_1152, false, kStage>
                      : whole                              ? run_stage<RowFormat::fp8_656, true, kStage>
                                                           : run_stage<RowFormat::fp8_656, false, kStage>;
  ECHO_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  kernel<<<1, kThreads, sizeof(Shared)>>>(p, errors.view(),
                                          {rows.data, entries.data, logits.data, out.data, references.data, sums.data});
  ECHO_CUDA_CHECK(cudaGetLastError());
  ECHO_CUDA_CHECK(cudaDeviceSynchronize());
  return {read(rows), read(entries), read(logits), read(out), read(references), read(sums)};
}

/// At the ends of what is unpacked without a conversion, and beyond.
constexpr float kOddScales[] = {0.0F,      -0.0F,    1e-40F, 0x1p-126F, 0x1.fcp-127F, 0x1p-133F,
                                0x1.fep7F, 0x1p8F,   1.5F,   0x1.02p0F, 0x1.01p0F,    0x1.000002p-5F,
                                -0.25F,    0x1p127F, NAN,    INFINITY};

}  // namespace

Case::Case(RowFormat format_, std::int32_t tiles, unsigned seed, bool wild)
    : format(format_), slots(static_cast<std::size_t>(tiles * kTile)) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  pool.resize(static_cast<std::size_t>(kSlots * row_bytes()));
  for (std::int32_t slot = 0; slot < kSlots; ++slot) {
    std::byte* row = pool.data() + slot * row_bytes();
    for (int i = 0; i < kRowDim; ++i) {
      if (format == RowFormat::fp8_656 && i < kLatent) {
        std::uint8_t code = to_e4m3(normal(engine) * 100.0F);
        if (wild || i % 7 == 0) {
          code = static_cast<std::uint8_t>(engine());  // any code, subnormals too
          code = (code & 0x7FU) == 0x7FU && !wild ? 0U : code;
        }
        row[i] = std::byte{code};
      } else {
        const std::uint16_t half = to_bf16(normal(engine));
        std::memcpy(row + (format == RowFormat::fp8_656 ? kLatent + 16 + (i - kLatent) * 2 : i * 2), &half, 2);
      }
    }
    for (int group = 0; group < 4 && format == RowFormat::fp8_656; ++group) {
      const int exponent = wild ? static_cast<int>(engine() % 40) - 20 : static_cast<int>(engine() % 4) - 9;
      const float scale =
          wild && engine() % 4 == 0 ? kOddScales[engine() % std::size(kOddScales)] : std::ldexp(1.0F, exponent);
      std::memcpy(row + kLatent + group * 4, &scale, sizeof scale);
    }
  }
  for (auto& slot : slots) {
    slot = static_cast<std::int32_t>(engine() % kSlots);
  }
  for (int i = 0; i < kHeads * kRowDim; ++i) {
    q.push_back(to_bf16(normal(engine)));
  }
}

std::int32_t Case::row_bytes() const { return format == RowFormat::fp8_656 ? kFp8RowBytes : kBf16RowBytes; }

std::uint16_t Case::element(std::int32_t slot, int i) const {
  const auto row = static_cast<std::size_t>(slot) * static_cast<std::size_t>(row_bytes());
  if (format == RowFormat::fp8_656 && i < kLatent) {
    const float scale = float_of(word_at(pool, row + kLatent + static_cast<std::size_t>(i / 128) * 4));
    return to_bf16(from_e4m3(static_cast<std::uint8_t>(pool[row + static_cast<std::size_t>(i)])) * scale);
  }
  std::uint16_t half = 0;
  std::memcpy(&half, pool.data() + row + (format == RowFormat::fp8_656 ? kLatent + 16 + (i - kLatent) * 2 : i * 2), 2);
  return half;
}

double Case::logit(int head, std::int32_t slot) const {
  double sum = 0.0;
  for (int i = 0; i < kRowDim; ++i) {
    sum += static_cast<double>(from_bf16(q[static_cast<std::size_t>(head * kRowDim + i)])) *
           static_cast<double>(from_bf16(element(slot, i)));
  }
  return sum;
}

Result run(Stage stage, const Case& input, bool whole) {
  switch (stage) {
    case Stage::rows:
      return run_case<Stage::rows>(input, whole);
    case Stage::logits:
      return run_case<Stage::logits>(input, whole);
    case Stage::sums:
      break;
  }
  return run_case<Stage::sums>(input, whole);
}

}  // namespace echo::mla_stages
