#include "step.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <thread>

// Compiles a function for two instruction sets; the loader selects one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FSDP_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FSDP_CLONES
#endif

namespace fsdp {
namespace {

constexpr std::int64_t kSpan = 1 << 15;       // elements that a thread takes at a time, about
constexpr std::int64_t kPerThread = 1 << 17;  // elements that are worth starting a thread for
constexpr float kTiny = std::numeric_limits<float>::min();

// Elements of a parameter that one thread updates.
struct ParamSpan {
  std::size_t index;
  std::int64_t start, stop;
};

// Memory of a thread for the new moments of a block.
struct BlockMoments {
  std::vector<float> first, second;
};

// One of the two moments of a block; `decoded` has room for its elements.
struct QuantizedMoment {
  std::uint8_t* codes;
  float* scale;
  float* decoded;
  const CodeBookTable* book;
};

FSDP_CLONES void update_fp32(float* __restrict param, const float* __restrict grad,
                             float* __restrict first, float* __restrict second,
                             std::int64_t count, const Coefficients& coefficients) {
  const Coefficients c = coefficients;
  for (std::int64_t i = 0; i < count; ++i) {
    float m = first[i], v = second[i];
    param[i] = adam_element(param[i], grad[i], m, v, c);
    first[i] = m;
    second[i] = v;
  }
}

// Quantizes a block; returns whether it is finite.
bool encode(const QuantizedMoment& quantized, float largest, std::int64_t count) {
  const CodeBookTable& book = *quantized.book;
  const bool finite = std::isfinite(largest);
  if (!finite || largest < kTiny) {
    *quantized.scale = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    std::fill(quantized.codes, quantized.codes + count, static_cast<std::uint8_t>(book.zero()));
    return finite;
  }
  *quantized.scale = largest;
  active_kernels().encode(quantized.decoded, 1.0f / largest, book.lookup(), quantized.codes, count);
  return true;
}

CodedMoment coded(const QuantizedMoment& quantized) {
  return {quantized.codes, quantized.book->values(), *quantized.scale, quantized.decoded};
}

// Updates a block; returns whether its moments are finite.
bool update_block(float* param, const float* grad, const QuantizedMoment& first,
                  const QuantizedMoment& second, std::int64_t count, const Coefficients& c) {
  const Largest largest =
      active_kernels().update(param, grad, coded(first), coded(second), count, c);
  const bool finite = encode(first, largest.first, count);
  return encode(second, largest.second, count) && finite;
}

std::vector<ParamSpan> spans_of(const std::vector<LocalParam>& params, std::int64_t block_size) {
  const std::int64_t length = std::max<std::int64_t>(1, kSpan / block_size) * block_size;
  std::vector<ParamSpan> spans;
  for (std::size_t index = 0; index < params.size(); ++index) {
    const std::int64_t count = params[index].count;
    for (std::int64_t start = 0; start < count; start += length) {
      spans.push_back({index, start, std::min(start + length, count)});
    }
  }
  return spans;
}

bool update_span(const LocalParam& local, const ParamSpan& span, const Coefficients& c,
                 std::int64_t block_size, const CodeBookTable& first, const CodeBookTable& second,
                 BlockMoments& moments) {
  if (local.first_scales == nullptr) {
    update_fp32(local.param + span.start, local.grad + span.start,
                static_cast<float*>(local.first) + span.start,
                static_cast<float*>(local.second) + span.start, span.stop - span.start, c);
    return true;
  }
  bool finite = true;
  for (std::int64_t at = span.start; at < span.stop; at += block_size) {
    const QuantizedMoment m{static_cast<std::uint8_t*>(local.first) + at,
                            local.first_scales + at / block_size, moments.first.data(), &first};
    const QuantizedMoment v{static_cast<std::uint8_t*>(local.second) + at,
                            local.second_scales + at / block_size, moments.second.data(), &second};
    const std::int64_t count = std::min(block_size, span.stop - at);
    finite = update_block(local.param + at, local.grad + at, m, v, count, c) && finite;
  }
  return finite;
}

}  // namespace

std::vector<std::size_t> step(const std::vector<LocalParam>& params, const Coefficients& c,
                              std::int64_t block_size, const CodeBookTable& first,
                              const CodeBookTable& second, int threads) {
  const std::vector<ParamSpan> spans = spans_of(params, block_size);
  std::int64_t total = 0, longest = 0;
  for (const LocalParam& local : params) {
    total += local.count;
    longest = std::max(longest, local.count);
  }
  const std::int64_t useful = std::min<std::int64_t>(threads, total / kPerThread);
  const std::size_t workers = static_cast<std::size_t>(std::max<std::int64_t>(1, useful));
  const std::size_t block_elements = static_cast<std::size_t>(std::min(block_size, longest));
  std::vector<BlockMoments> moments(workers);
  for (BlockMoments& each : moments) {
    each.first.resize(block_elements);
    each.second.resize(block_elements);
  }
  std::vector<std::atomic<bool>> not_finite(params.size());
  std::atomic<std::size_t> next = 0;
  const auto work = [&](BlockMoments& own) {
    for (std::size_t i; (i = next.fetch_add(1)) < spans.size();) {
      const ParamSpan& span = spans[i];
      if (!update_span(params[span.index], span, c, block_size, first, second, own)) {
        not_finite[span.index] = true;
      }
    }
  };
  {
    std::vector<std::jthread> others;
    others.reserve(workers - 1);
    for (std::size_t i = 1; i < workers; ++i) others.emplace_back([&, i] { work(moments[i]); });
    work(moments[0]);
  }
  std::vector<std::size_t> indices;
  for (std::size_t index = 0; index < params.size(); ++index) {
    if (not_finite[index]) indices.push_back(index);
  }
  return indices;
}

}  // namespace fsdp
