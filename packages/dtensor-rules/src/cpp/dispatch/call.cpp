#include "dtensor_rules/dispatch/call.h"

#include <bit>

#include "dtensor_rules/plans/spec.h"

namespace dtensor_rules {

namespace {

bool has_python(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python);
}

Reason read_plain(const at::Tensor& tensor, Call& call) {
  // Torch warns about vectors of one element, and refuses the rest unless told otherwise.
  if (tensor.dim() != 0) {
    return Reason::kPlainTensor;
  }
  const auto device = tensor.device();
  call.key.add(
      Tag::kScalarTensor,
      static_cast<uint64_t>(tensor.scalar_type()) |
          static_cast<uint64_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number()) << 8 |
          static_cast<uint64_t>(device.type()) << 9 |
          static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 17);
  return Reason::kNone;
}

}  // namespace

Reason read_tensor(const at::Tensor& tensor, size_t argument, int64_t element, Call& call) {
  if (!tensor.defined()) {
    call.key.add(Tag::kUndefined);
    return Reason::kNone;
  }
  if (!has_python(tensor)) {
    return read_plain(tensor, call);
  }
  PyObject* object = python_object(tensor);
  if (!is_dtensor(object)) {
    return Reason::kSubclass;
  }
  PyObject* local_object = local_tensor_slot(object);
  PyObject* spec_object = spec_slot(object);
  if (local_object == nullptr || spec_object == nullptr || !THPVariable_Check(local_object)) {
    return Reason::kUnsupported;
  }
  const at::Tensor& local = THPVariable_Unpack(local_object);
  if (has_python(local)) {
    return Reason::kLocalSubclass;
  }
  const Spec& spec = intern(spec_object);
  if (spec.symbolic) {
    return Reason::kSymInt;
  }
  if (!spec.participates) {
    return Reason::kNotInMesh;
  }
  call.key.add(Tag::kDTensor, spec.id);
  call.dtensors.push_back(
      {argument, element, py::reinterpret_borrow<py::object>(local_object)});
  return Reason::kNone;
}

void add_number(Call& call, bool by_value, Tag tag, uint64_t value) {
  if (by_value) {
    call.key.add(tag, value);
  } else {
    call.key.add(Tag::kNumber, static_cast<uint64_t>(tag));
  }
}

void add_device(Call& call, at::Device device) {
  call.key.add(
      Tag::kDevice,
      static_cast<uint64_t>(device.type()) |
          static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 8);
}

void add_string(Call& call, std::string_view text) {
  call.key.add(Tag::kString, text.size());
  for (size_t begin = 0; begin < text.size(); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    text.copy(reinterpret_cast<char*>(&word), sizeof(word), begin);
    call.key.add_word(word);
  }
}

namespace {

Reason read_value(
    const c10::IValue& value, size_t argument, int64_t element, bool by_value, Call& call);

Reason read_list(const c10::IValue& list, size_t argument, bool by_value, Call& call) {
  if (list.isIntList()) {
    const auto items = list.toIntVector();
    call.key.add(Tag::kList, items.size());
    for (const int64_t item : items) {
      call.key.add(Tag::kInt, static_cast<uint64_t>(item));
    }
    return Reason::kNone;
  }
  const auto items = list.toListRef();
  call.key.add(Tag::kList, items.size());
  for (size_t index = 0; index < items.size(); ++index) {
    if (items[index].isList()) {
      return Reason::kUnsupported;
    }
    const Reason reason =
        read_value(items[index], argument, static_cast<int64_t>(index), by_value, call);
    if (reason != Reason::kNone) {
      return reason;
    }
  }
  return Reason::kNone;
}

Reason read_value(
    const c10::IValue& value, size_t argument, int64_t element, bool by_value, Call& call) {
  if (value.isTensor()) {
    return read_tensor(value.toTensor(), argument, element, call);
  }
  if (value.isNone()) {
    call.key.add(Tag::kNone);
  } else if (value.isInt()) {
    add_number(call, by_value, Tag::kInt, static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    add_number(call, by_value, Tag::kBool, value.toBool());
  } else if (value.isDouble()) {
    add_number(call, by_value, Tag::kDouble, std::bit_cast<uint64_t>(value.toDouble()));
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    add_number(call, by_value, Tag::kComplex, std::bit_cast<uint64_t>(number.real()));
    add_number(call, by_value, Tag::kComplex, std::bit_cast<uint64_t>(number.imag()));
  } else if (value.isString()) {
    add_string(call, value.toStringRef());
  } else if (value.isDevice()) {
    add_device(call, value.toDevice());
  } else if (value.isList() && element < 0) {
    return read_list(value, argument, by_value, call);
  } else if (value.isSymInt() || value.isSymFloat() || value.isSymBool()) {
    return Reason::kSymInt;
  } else {
    return Reason::kUnsupported;
  }
  return Reason::kNone;
}

}  // namespace

Reason read_call(const Operator& op, c10::ArrayRef<c10::IValue> arguments, Call& call) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    const Reason reason =
        read_value(arguments[index], index, -1, op.by_value[index], call);
    if (reason != Reason::kNone) {
      return reason;
    }
  }
  return call.dtensors.empty() ? Reason::kNoDTensor : Reason::kNone;
}

}  // namespace dtensor_rules
