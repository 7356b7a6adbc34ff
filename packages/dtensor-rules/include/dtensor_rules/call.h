// One call of an operator, read off the dispatcher's stack.
#pragma once

#include "dtensor_rules/key.h"
#include "dtensor_rules/operator.h"

namespace dtensor_rules {

// A DTensor among the arguments; element -1: the argument itself, otherwise an item of a list.
struct DTensorArgument {
  size_t argument;
  int64_t element;
  PyObject* object;         // borrowed from the stack
  const at::Tensor* local;  // in the object's slot
};

struct Call {
  explicit Call(const Operator& op) : key(op.id) {}

  Key key;
  c10::SmallVector<DTensorArgument, 6> dtensors;
};

// Reads the arguments on top of the stack into `call`; other than none, why a plan cannot run
// them. Needs the GIL.
Reason read_call(const Operator& op, c10::ArrayRef<c10::IValue> arguments, Call& call);

}  // namespace dtensor_rules
