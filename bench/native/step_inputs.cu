// What a step's verbs work on. A token's score is scale x raw: raw = sum of w relu(q . k) over the heads does not
// change from step to step, since queries stay as they are, and over random keys it is bell-shaped, of about kRawSpread
// its mean. The scale of its key adds what changes,
//   scale = kKeyScale x (1 + kRawSpread x (kSlow a + kFast e + kShift g)),
// as traces of the "long context" kind do: a lasts about kSlowSteps steps, e is new in each, g is the same for all
// tokens of a layer and a session. Each is normal: a and g are random numbers of every so many steps, and mixtures of
// two neighbours between them. Nothing is stored. Cost: three random numbers per token, some ms for 80 M tokens; never
// timed.
#include "step_inputs.hpp"

#include "hashes.hpp"
#include "kernels/launch.cuh"

namespace echo::bench {
namespace {

constexpr int kThreads = 512;
constexpr std::int32_t kKeyDim = 128;
constexpr float kRawSpread = 0.22F;
constexpr float kKeyScale = 0.1F;  ///< brings keys of random codes to the length of normal ones
constexpr float kSlow = 0.40F;
constexpr float kFast = 0.20F;
constexpr float kShift = 0.50F;
constexpr std::uint32_t kSlowSteps = 16;
constexpr std::uint32_t kShiftSteps = 48;
constexpr float kLeastScale = 0.05F;

__device__ std::int64_t thread_of_grid() { return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ std::int64_t threads_of_grid() { return static_cast<std::int64_t>(gridDim.x) * kThreads; }

__device__ float normal(std::uint32_t bits) { return normcdfinvf(unit_float(bits) + 0.5F / 16777216.0F); }

/// Normal at all times, another course for each key.
__device__ float drifting(std::uint32_t key, std::uint32_t time, std::uint32_t period) {
  const std::uint32_t at = time + key % period;
  const float part = static_cast<float>(at % period) / static_cast<float>(period);
  const float sum = normal(hash(key, at / period)) * (1.0F - part) + normal(hash(key, at / period + 1U)) * part;
  return sum * rsqrtf((1.0F - part) * (1.0F - part) + part * part);
}

__global__ __launch_bounds__(kThreads) void fill_index_keys(const LayerView* layers) {
  const LayerView layer = layers[blockIdx.y];
  const auto block_words = static_cast<std::int32_t>(layer.index_block_bytes / 4);
  constexpr std::int32_t kKeyWords = kTokensPerBlock * kKeyDim / 4;
  const std::int64_t blocks = layer.host_rows / kTokensPerBlock;
  for (std::int64_t i = thread_of_grid(); i < blocks * kKeyWords; i += threads_of_grid()) {
    auto* words = reinterpret_cast<std::uint32_t*>(layer.index_keys) + i / kKeyWords * block_words;
    words[i % kKeyWords] = hash(blockIdx.y, static_cast<std::uint32_t>(i)) & 0xDFDFDFDFU;  // below 32, and no NaN
  }
}

__global__ __launch_bounds__(kThreads) void scale_keys(ScaleParams p) {
  const LayerView layer = p.layers[blockIdx.y];
  const std::uint32_t layer_key = hash(0x5CA1E5U, blockIdx.y);
  for (std::int64_t i = thread_of_grid(); i < static_cast<std::int64_t>(p.batch) * p.first_new;
       i += threads_of_grid()) {
    const auto entry = static_cast<std::int32_t>(i / p.first_new);
    const std::int32_t row = entry * p.session_rows + static_cast<std::int32_t>(i % p.first_new);
    const std::uint32_t token = hash(layer_key, static_cast<std::uint32_t>(row));
    const std::uint32_t session = hash(layer_key, 0x80000000U + static_cast<std::uint32_t>(entry));
    const float change = kSlow * drifting(token, p.time, kSlowSteps) + kFast * normal(hash(token, 0x10000U + p.time)) +
                         kShift * drifting(session, p.time, kShiftSteps);
    std::byte* block = row_address(layer.index_keys, row / kTokensPerBlock, layer.index_block_bytes);
    *reinterpret_cast<float*>(index_scale_address(block, row % kTokensPerBlock, kKeyDim)) =
        kKeyScale * fmaxf(1.0F + kRawSpread * change, kLeastScale);
  }
}

__global__ __launch_bounds__(kThreads) void fill_normal(std::uint16_t* values, std::int64_t count, float deviation,
                                                        std::uint32_t seed) {
  for (std::int64_t i = thread_of_grid(); i < count; i += threads_of_grid()) {
    values[i] = to_bf16(deviation * normal(hash(seed, static_cast<std::uint32_t>(i))));
  }
}

__global__ __launch_bounds__(kThreads) void fill_weights(float* weights, std::int64_t count, std::uint32_t seed) {
  for (std::int64_t i = thread_of_grid(); i < count; i += threads_of_grid()) {
    weights[i] = 0.5F + unit_float(hash(seed, static_cast<std::uint32_t>(i)));
  }
}

__global__ __launch_bounds__(kThreads) void wander(const std::byte* host, std::int64_t pieces, std::uint32_t seed,
                                                   std::uint32_t* sink) {
  const std::uint32_t key = hash(seed, static_cast<std::uint32_t>(thread_of_grid()));
  const auto piece =
      static_cast<std::int64_t>((static_cast<std::uint64_t>(hash(key)) * static_cast<std::uint64_t>(pieces)) >> 32);
  const uint4 found = reinterpret_cast<const uint4*>(host)[piece];
  if ((found.x & found.y & found.z & found.w) == 0xFFFFFFFFU) {  // never: the compiler cannot know, and keeps the load
    *sink = seed;
  }
}

}  // namespace

void launch_fill_index_keys(const LayerView* layers, std::int32_t layer_count, const LaunchContext& context) {
  launch(context, fill_index_keys, dim3(256, static_cast<unsigned>(layer_count)), kThreads, 0, layers);
}

void launch_scale_keys(const ScaleParams& params, const LaunchContext& context) {
  launch(context, scale_keys, dim3(64, static_cast<unsigned>(params.layer_count)), kThreads, 0, params);
}

void launch_fill_normal(std::uint16_t* values, std::int64_t count, float deviation, std::uint32_t seed,
                        const LaunchContext& context) {
  launch(context, fill_normal, 264, kThreads, 0, values, count, deviation, seed);
}

void launch_fill_weights(float* weights, std::int64_t count, std::uint32_t seed, const LaunchContext& context) {
  launch(context, fill_weights, 264, kThreads, 0, weights, count, seed);
}

void launch_wander(const std::byte* host, std::size_t bytes, std::uint32_t seed, std::uint32_t* sink,
                   const LaunchContext& context) {
  constexpr unsigned kBlocks = 256;  // one read a thread: more translations than are kept
  launch(context, wander, kBlocks, kThreads, 0, host, static_cast<std::int64_t>(bytes / sizeof(uint4)), seed, sink);
}

}  // namespace echo::bench
