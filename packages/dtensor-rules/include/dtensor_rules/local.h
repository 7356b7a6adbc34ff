// The local operator's arguments, of types that are known when this is compiled: the caller's,
// with local tensors in place of DTensors and the plan's values in place of global sizes.
#pragma once

#include <ATen/core/IListRef.h>

#include "dtensor_rules/call.h"
#include "dtensor_rules/plan.h"

namespace dtensor_rules {

// Goes through a call's DTensors and its plan's moves and values, which are in the arguments' order.
class Walk {
 public:
  Walk(const Call& call, const Plan& plan)
      : dtensor_(call.dtensors.begin()),
        dtensors_end_(call.dtensors.end()),
        move_(plan.moves.begin()),
        moves_end_(plan.moves.end()),
        value_(plan.values.begin()),
        values_end_(plan.values.end()) {}

  // What the operator gets for this tensor.
  at::Tensor local(const at::Tensor& tensor, size_t argument, int64_t element) {
    if (dtensor_ == dtensors_end_ || dtensor_->argument != argument ||
        dtensor_->element != element) {
      return tensor;  // undefined, or a plain scalar
    }
    const at::Tensor mine = *dtensor_->local;
    ++dtensor_;
    if (move_ == moves_end_ || move_->argument != argument || move_->element != element) {
      return mine;
    }
    return transformed(*(move_++)->transform, mine);
  }

  // The plan's own value for this argument; null where the caller's is used.
  const Value* value(size_t argument) {
    while (value_ != values_end_ && value_->argument < argument) {
      ++value_;
    }
    return value_ != values_end_ && value_->argument == argument ? &*value_ : nullptr;
  }

 private:
  const DTensorArgument* dtensor_;
  const DTensorArgument* dtensors_end_;
  std::vector<Move>::const_iterator move_, moves_end_;
  std::vector<Value>::const_iterator value_, values_end_;
};

// Of any other type: a value.
template <class T>
struct Local {
  std::optional<T> held;
  void set(const T& given, size_t argument, Walk& walk) {
    const Value* value = walk.value(argument);
    held = value == nullptr ? given : value->value.to<T>();
  }
  const T& get() { return *held; }
};

template <>
struct Local<at::Tensor> {
  at::Tensor held;
  void set(const at::Tensor& given, size_t argument, Walk& walk) {
    held = walk.local(given, argument, -1);
  }
  at::Tensor& get() { return held; }
};

template <>
struct Local<std::optional<at::Tensor>> {
  std::optional<at::Tensor> held;
  void set(const std::optional<at::Tensor>& given, size_t argument, Walk& walk) {
    if (given.has_value()) {
      held = walk.local(*given, argument, -1);
    }
  }
  const std::optional<at::Tensor>& get() { return held; }
};

template <class List>
struct LocalTensors {
  std::vector<at::Tensor> held;
  void set(const List& given, size_t argument, Walk& walk) {
    held.reserve(given.size());
    for (const at::Tensor& tensor : given) {
      held.push_back(walk.local(tensor, argument, static_cast<int64_t>(held.size())));
    }
  }
  List get() { return List(held); }
};

template <>
struct Local<at::TensorList> : LocalTensors<at::TensorList> {};
template <>
struct Local<at::ITensorListRef> : LocalTensors<at::ITensorListRef> {};

// Sizes, whose memory is the caller's or the plan's.
template <class Sizes>
struct LocalSizes {
  Sizes held;
  void set(const Sizes& given, size_t argument, Walk& walk) {
    const Value* value = walk.value(argument);
    if (value == nullptr) {
      held = given;
    } else if constexpr (std::is_same_v<Sizes, c10::SymIntArrayRef>) {
      held = value->symbolic_sizes;
    } else {
      held = at::IntArrayRef(value->sizes);
    }
  }
  const Sizes& get() { return held; }
};

template <>
struct Local<c10::SymIntArrayRef> : LocalSizes<c10::SymIntArrayRef> {};
template <>
struct Local<at::IntArrayRef> : LocalSizes<at::IntArrayRef> {};
template <>
struct Local<at::OptionalIntArrayRef> {
  at::OptionalIntArrayRef held;
  void set(const at::OptionalIntArrayRef& given, size_t argument, Walk& walk) {
    const Value* value = walk.value(argument);
    if (value == nullptr) {
      held = given;
    } else if (!value->value.isNone()) {
      held = at::IntArrayRef(value->sizes);
    }
  }
  const at::OptionalIntArrayRef& get() { return held; }
};

// No plan changes a string.
template <>
struct Local<std::string_view> {
  std::string_view held;
  void set(std::string_view given, size_t, Walk&) { held = given; }
  std::string_view get() { return held; }
};

}  // namespace dtensor_rules
