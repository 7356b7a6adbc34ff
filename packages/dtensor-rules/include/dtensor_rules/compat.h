// What differs between the minor versions of torch that this is compiled for; the Python side has
// _compat.py. An interface is recognised by what it offers where that can be seen at compile time,
// and a behaviour, which cannot, by torch's version.
#pragma once

#include <torch/version.h>

#include <string>
#include <type_traits>

#include "dtensor_rules/torch.h"

namespace dtensor_rules {

constexpr bool torch_is_at_least(int major, int minor) {
  return TORCH_VERSION_MAJOR > major ||
      (TORCH_VERSION_MAJOR == major && TORCH_VERSION_MINOR >= minor);
}

// The Python object in a tensor's slot, borrowed; null where there is none. A template, so that only
// the interface that this torch has is compiled.
template <typename Slot>
PyObject* slotted_object(Slot* slot) {
  if constexpr (requires { slot->load_pyobj(); }) {
    return slot->load_pyobj();
  } else {
    return slot->check_pyobj().value_or(nullptr);
  }
}

// How the kernels of functional collectives take a group: by its name, or as Any (a name or a process
// group). `Name` is the string's type.
constexpr bool kGroupsAreValues = torch_is_at_least(2, 12);
template <class Name>
using Group = std::conditional_t<kGroupsAreValues, const c10::IValue&, Name>;
// And how all_reduce takes what it reduces by.
using AllReduceOperation =
    std::conditional_t<torch_is_at_least(2, 15), const c10::IValue&, std::string>;

// A dim gathered from uneven shards is cut to its size: as a copy, or as a view of what was gathered.
constexpr bool kCutGatheredIsCopied = torch_is_at_least(2, 13);

}  // namespace dtensor_rules
