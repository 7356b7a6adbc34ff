// The local operator's arguments, of types that are known when this is compiled: the caller's,
// with local tensors in place of DTensors and the plan's values in place of global sizes.
#pragma once

#include <ATen/core/IListRef.h>

#include "dtensor_rules/dispatch/call.h"
#include "dtensor_rules/plans/plan.h"

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

  // The DTensor that stands here, if one does, and what its local tensor goes through first.
  const DTensorArgument* dtensor(size_t argument, int64_t element) {
    const bool here = dtensor_ != dtensors_end_ && dtensor_->argument == argument &&
        dtensor_->element == element;
    return here ? dtensor_++ : nullptr;
  }
  const Transform* transform(size_t argument, int64_t element) {
    const bool here =
        move_ != moves_end_ && move_->argument == argument && move_->element == element;
    return here ? (move_++)->transform.get() : nullptr;
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

// A tensor for the operator: borrowed where it lives elsewhere, for torch takes the GIL each time
// that a tensor which Python has too gets a second holder, or loses it. The call holds the local
// tensors of DTensors, and has to outlive it. Needs the GIL until it is gone.
class Borrowed {
 public:
  Borrowed(const at::Tensor& given, size_t argument, int64_t element, Walk& walk) {
    const DTensorArgument* dtensor = walk.dtensor(argument, element);
    if (dtensor == nullptr) {
      tensor_ = &given;  // undefined, or a plain scalar
      return;
    }
    tensor_ = &dtensor->local_tensor();
    if (const Transform* transform = walk.transform(argument, element)) {
      made_ = transformed(*transform, *tensor_);
    }
  }

  const at::Tensor& tensor() const { return made_.defined() ? made_ : *tensor_; }

 private:
  const at::Tensor* tensor_;
  at::Tensor made_;
};

// Handles of tensors that do not count as holders (c10::MaybeOwned's borrows).
using Handles = c10::MaybeOwnedTraits<at::Tensor>;

// Of any other type: a value.
template <class T>
struct Local {
  std::optional<T> local;
  void set(const T& given, size_t argument, Walk& walk) {
    const Value* value = walk.value(argument);
    local = value == nullptr ? given : value->value.to<T>();
  }
  const T& get() { return *local; }
};

template <>
struct Local<at::Tensor> {
  std::optional<Borrowed> borrowed;
  void set(const at::Tensor& given, size_t argument, Walk& walk) {
    borrowed.emplace(given, argument, -1, walk);
  }
  // What an operator writes to is not const.
  at::Tensor& get() { return const_cast<at::Tensor&>(borrowed->tensor()); }
};

template <>
struct Local<std::optional<at::Tensor>> {
  std::optional<Borrowed> borrowed;
  std::optional<at::Tensor> handle;
  ~Local() {
    if (handle.has_value()) {
      Handles::destroyBorrow(*handle);
    }
  }
  void set(const std::optional<at::Tensor>& given, size_t argument, Walk& walk) {
    if (given.has_value()) {
      borrowed.emplace(*given, argument, -1, walk);
      handle = Handles::createBorrow(borrowed->tensor());
    }
  }
  const std::optional<at::Tensor>& get() { return handle; }
};

template <class List>
struct LocalTensors {
  std::vector<Borrowed> borrowed;
  std::vector<at::Tensor> handles;
  ~LocalTensors() {
    for (at::Tensor& handle : handles) {
      Handles::destroyBorrow(handle);
    }
  }
  void set(const List& given, size_t argument, Walk& walk) {
    borrowed.reserve(given.size());
    handles.reserve(given.size());
    for (const at::Tensor& tensor : given) {
      borrowed.emplace_back(tensor, argument, static_cast<int64_t>(borrowed.size()), walk);
      handles.push_back(Handles::createBorrow(borrowed.back().tensor()));
    }
  }
  List get() { return List(handles); }
};

template <>
struct Local<at::TensorList> : LocalTensors<at::TensorList> {};
template <>
struct Local<at::ITensorListRef> : LocalTensors<at::ITensorListRef> {};

// Sizes, whose memory is the caller's or the plan's.
template <class Sizes>
struct LocalSizes {
  Sizes local;
  void set(const Sizes& given, size_t argument, Walk& walk) {
    const Value* value = walk.value(argument);
    if (value == nullptr) {
      local = given;
    } else if constexpr (std::is_same_v<Sizes, c10::SymIntArrayRef>) {
      local = value->symbolic_sizes;
    } else {
      local = at::IntArrayRef(value->sizes);
    }
  }
  const Sizes& get() { return local; }
};

template <>
struct Local<c10::SymIntArrayRef> : LocalSizes<c10::SymIntArrayRef> {};
template <>
struct Local<at::IntArrayRef> : LocalSizes<at::IntArrayRef> {};
template <>
struct Local<at::OptionalIntArrayRef> {
  at::OptionalIntArrayRef local;
  void set(const at::OptionalIntArrayRef& given, size_t argument, Walk& walk) {
    const Value* value = walk.value(argument);
    if (value == nullptr) {
      local = given;
    } else if (!value->value.isNone()) {
      local = at::IntArrayRef(value->sizes);
    }
  }
  const at::OptionalIntArrayRef& get() { return local; }
};

// No plan changes these.
template <class T>
struct LocalAsGiven {
  T local;
  void set(const T& given, size_t, Walk&) { local = given; }
  const T& get() { return local; }
};

template <>
struct Local<std::string_view> : LocalAsGiven<std::string_view> {};
template <>
struct Local<at::ArrayRef<at::Scalar>> : LocalAsGiven<at::ArrayRef<at::Scalar>> {};

}  // namespace dtensor_rules
