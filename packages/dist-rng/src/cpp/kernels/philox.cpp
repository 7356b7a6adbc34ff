// Philox's words, and the elements made of them by the formulas of philox/formulas.h.
#include "../philox/philox.h"

#include "element.h"
#include "kernels.h"
#include "../philox/formulas.h"

namespace dist_rng::DIST_RNG_ISA {
namespace {

template <typename T, typename Formula, int kLane>
void convert_lane(const Formula& formula, const std::uint32_t* const* words, void* out,
                  std::int64_t count) {
  T* elements = static_cast<T*>(out);
  const std::uint32_t* const x = words[0];
  const std::uint32_t* const y = words[1];
  const std::uint32_t* const z = words[2];
  const std::uint32_t* const w = words[3];
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    elements[i] = formula(Words{x[i], y[i], z[i], w[i]}, kLane);
  }
}

template <typename T, typename Formula>
void convert(const PhiloxArguments& arguments, const std::uint32_t* const* words, int lane,
             const void*, void* out, std::int64_t count) {
  const Formula formula(arguments);
  switch (lane) {
    case 0:
      return convert_lane<T, Formula, 0>(formula, words, out, count);
    case 1:
      return convert_lane<T, Formula, 1>(formula, words, out, count);
    case 2:
      return convert_lane<T, Formula, 2>(formula, words, out, count);
    default:
      return convert_lane<T, Formula, 3>(formula, words, out, count);
  }
}

template <typename T>
void convert_tensor(const PhiloxArguments& arguments, const std::uint32_t* const* words, int lane,
                    const void* probabilities, void* out, std::int64_t count) {
  const BernoulliTensorOf<T> formula(arguments);
  const auto* typed_probabilities = static_cast<const Wide<T>*>(probabilities);
  T* elements = static_cast<T*>(out);
  for (std::int64_t i = 0; i < count; ++i) {
    const Words call{words[0][i], words[1][i], words[2][i], words[3][i]};
    elements[i] = formula(call, lane, typed_probabilities[i]);
  }
}

// for_floating and the like return a Kernel; this assigns a PhiloxConvert instead.
template <template <typename> typename Formula>
struct Assign {
  PhiloxConvert& converter;
  template <typename T>
  Kernel operator()() const {
    converter = convert<T, Formula<T>>;
    return {};
  }
};

}  // namespace

void philox_calls(std::uint64_t seed, std::uint64_t call, std::uint64_t thread, std::int64_t count,
                  std::uint32_t* const* words) {
  std::uint32_t* const x = words[0];
  std::uint32_t* const y = words[1];
  std::uint32_t* const z = words[2];
  std::uint32_t* const w = words[3];
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const Words made = philox_call(seed, call, thread + static_cast<std::uint64_t>(i));
    x[i] = made.x;
    y[i] = made.y;
    z[i] = made.z;
    w[i] = made.w;
  }
}

PhiloxConvert philox_convert(PhiloxKind kind, Dtype dtype) {
  PhiloxConvert converter = nullptr;
  switch (kind) {
    case PhiloxKind::kUniform:
      for_floating(dtype, Assign<UniformOf>{converter});
      break;
    case PhiloxKind::kNormal:
      for_floating(dtype, Assign<NormalOf>{converter});
      break;
    case PhiloxKind::kExponential:
      for_floating(dtype, Assign<ExponentialOf>{converter});
      break;
    case PhiloxKind::kBernoulli:
      for_common(dtype, Assign<BernoulliOf>{converter});
      break;
    case PhiloxKind::kBernoulliTensor:
      for_common(dtype, [&]<typename T>() -> Kernel {
        converter = convert_tensor<T>;
        return {};
      });
      break;
    case PhiloxKind::kDropoutMask:
      if (dtype == Dtype::kBool) converter = convert<bool, DropoutMaskOf<bool>>;
      break;
    case PhiloxKind::kModulo32:
      for_every(dtype, Assign<Modulo32Of>{converter});
      break;
    case PhiloxKind::kModulo64:
      for_every(dtype, Assign<Modulo64Of>{converter});
      break;
  }
  return converter;
}

}  // namespace dist_rng::DIST_RNG_ISA
