// One call of an operator, read off the dispatcher's stack.
#pragma once

#include "dtensor_rules/plans/key.h"
#include "dtensor_rules/plans/operator.h"

namespace dtensor_rules {

// A DTensor among the arguments; element -1: the argument itself, otherwise an item of a list.
struct DTensorArgument {
  size_t argument;
  int64_t element;
  // The tensor in the DTensor's slot. Held: while another argument is redistributed others may run,
  // and give this DTensor another one.
  py::object local;

  const at::Tensor& local_tensor() const { return THPVariable_Unpack(local.ptr()); }
};

struct Call {
  explicit Call(const Operator& op) : key(op.id) {}

  Key key;
  c10::SmallVector<DTensorArgument, 6> dtensors;
};

// Reads one tensor into `call`; other than none, why a plan cannot run it. Needs the GIL.
Reason read_tensor(const at::Tensor& tensor, size_t argument, int64_t element, Call& call);
// A number whose value does not matter leaves its type: it decides the type of the result.
void add_number(Call& call, bool by_value, Tag tag, uint64_t value);
void add_device(Call& call, at::Device device);
void add_string(Call& call, std::string_view text);

// Reads the arguments on top of the stack into `call`; other than none, why a plan cannot run
// them. Needs the GIL.
Reason read_call(const Operator& op, c10::ArrayRef<c10::IValue> arguments, Call& call);

}  // namespace dtensor_rules
