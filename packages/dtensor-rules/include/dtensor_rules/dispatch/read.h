// Reads arguments whose types are known when this is compiled into a call's key, with the tokens
// that read_call gives the same arguments on the dispatcher's stack.
#pragma once

#include <ATen/core/IListRef.h>

#include <bit>
#include <optional>

#include "dtensor_rules/dispatch/call.h"

namespace dtensor_rules {

// Where an argument is, and what of it is in the key.
struct Place {
  size_t argument;
  bool by_value;
};

inline Reason read(const at::Tensor& tensor, Place place, Call& call) {
  return read_tensor(tensor, place.argument, -1, call);
}

inline Reason read(int64_t value, Place place, Call& call) {
  add_number(call, place.by_value, Tag::kInt, static_cast<uint64_t>(value));
  return Reason::kNone;
}

inline Reason read(bool value, Place place, Call& call) {
  add_number(call, place.by_value, Tag::kBool, value);
  return Reason::kNone;
}

inline Reason read(double value, Place place, Call& call) {
  add_number(call, place.by_value, Tag::kDouble, std::bit_cast<uint64_t>(value));
  return Reason::kNone;
}

inline Reason read(const c10::SymInt& value, Place place, Call& call) {
  const auto number = value.maybe_as_int();
  return number ? read(*number, place, call) : Reason::kSymInt;
}

inline Reason read(const at::Scalar& value, Place place, Call& call) {
  if (value.isSymbolic()) {
    return Reason::kSymInt;
  }
  switch (value.type()) {
    case at::kDouble:
      return read(value.toDouble(), place, call);
    case at::kLong:
      return read(value.toLong(), place, call);
    case at::kBool:
      return read(value.toBool(), place, call);
    default:
      return Reason::kUnsupported;
  }
}

// dtypes, layouts and memory formats are numbers on the stack.
inline Reason read(at::ScalarType value, Place place, Call& call) {
  return read(static_cast<int64_t>(value), place, call);
}

inline Reason read(at::Layout value, Place place, Call& call) {
  return read(static_cast<int64_t>(value), place, call);
}

inline Reason read(at::MemoryFormat value, Place place, Call& call) {
  return read(static_cast<int64_t>(value), place, call);
}

inline Reason read(at::Device value, Place, Call& call) {
  add_device(call, value);
  return Reason::kNone;
}

inline Reason read(std::string_view value, Place, Call& call) {
  add_string(call, value);
  return Reason::kNone;
}

inline Reason read(at::IntArrayRef values, Place, Call& call) {
  call.key.add(Tag::kList, values.size());
  for (const int64_t value : values) {
    call.key.add(Tag::kInt, static_cast<uint64_t>(value));
  }
  return Reason::kNone;
}

inline Reason read(c10::SymIntArrayRef values, Place place, Call& call) {
  const auto plain = c10::asIntArrayRefSlowOpt(values);
  return plain ? read(*plain, place, call) : Reason::kSymInt;
}

inline Reason read(const at::OptionalIntArrayRef& values, Place place, Call& call) {
  if (!values.has_value()) {
    call.key.add(Tag::kNone);
    return Reason::kNone;
  }
  return read(*values, place, call);
}

inline Reason read(const at::ITensorListRef& tensors, Place place, Call& call) {
  call.key.add(Tag::kList, tensors.size());
  int64_t element = 0;
  for (const at::Tensor& tensor : tensors) {
    const Reason reason = read_tensor(tensor, place.argument, element++, call);
    if (reason != Reason::kNone) {
      return reason;
    }
  }
  return Reason::kNone;
}

inline Reason read(at::TensorList tensors, Place place, Call& call) {
  return read(at::ITensorListRef(tensors), place, call);
}

inline Reason read(at::ArrayRef<at::Scalar> values, Place place, Call& call) {
  call.key.add(Tag::kList, values.size());
  for (const at::Scalar& value : values) {
    if (const Reason reason = read(value, place, call); reason != Reason::kNone) {
      return reason;
    }
  }
  return Reason::kNone;
}

template <class T>
Reason read(const std::optional<T>& value, Place place, Call& call) {
  if (!value.has_value()) {
    call.key.add(Tag::kNone);
    return Reason::kNone;
  }
  return read(*value, place, call);
}

}  // namespace dtensor_rules
