// The functional all_gathers of CPU tensors, by another collective than torch's own.
//
// torch (2.11 to 2.15, Functional.cpp) makes each of them an allgather_into_tensor_coalesced. With
// gloo that breaks the heap, once in some millions of them: the two worker threads of a group note
// what they have done in one std::string (ProcessGroupGloo::runLoop, `lastCompletedWorkName`),
// without a lock, and "ALLGATHER_COALESCED" alone of all the names is too long to be stored in the
// string itself, so that both threads free the same memory. _allgather_base sends the same bytes and
// has a short name. tests/gathers_in_flight.py shows both. Registered while the library is enabled.

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "dtensor_rules/compat.h"
#include "dtensor_rules/dispatch/kernels.h"

namespace dtensor_rules {

namespace {

using GroupArgument = Group<std::string>;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

ProcessGroup resolve(const std::string& name) {
  return c10d::resolve_process_group(name);
}

[[maybe_unused]] ProcessGroup resolve(const c10::IValue& group) {
  return group.isString() ? resolve(group.toStringRef()) : group.toCustomClass<c10d::ProcessGroup>();
}

// The same memory, in a dtype that gloo has.
at::Tensor gloo_takes(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

at::Tensor gathered(const at::Tensor& input, int64_t group_size, const ProcessGroup& group) {
  // Scalars are gathered to a vector: torch 2.11's argmax asks for it, and fails on gloo without.
  const at::Tensor shard = input.dim() == 0 ? input.view(1) : input;
  at::DimVector sizes(shard.sizes());
  sizes[0] *= group_size;
  at::Tensor output = at::empty(sizes, shard.options());
  at::Tensor received = gloo_takes(output);
  at::Tensor sent = gloo_takes(shard.resolve_conj().contiguous());
  c10d::register_work(output, group->_allgather_base(received, sent));
  return output;
}

at::Tensor all_gather_into_tensor(
    const at::Tensor& input, int64_t group_size, GroupArgument group) {
  return gathered(input, group_size, resolve(group));
}

std::vector<at::Tensor> all_gather_into_tensor_coalesced(
    std::vector<at::Tensor> inputs, int64_t group_size, GroupArgument group) {
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& input : inputs) {
    outputs.push_back(gathered(input, group_size, resolve(group)));
  }
  return outputs;
}

// What is registered; destroying it takes the kernels back.
std::unique_ptr<torch::Library>& registered() {
  static auto* library = new std::unique_ptr<torch::Library>;  // outlives the interpreter's end
  return *library;
}

}  // namespace

void set_cpu_gathers(bool on) {
  if (!on) {
    registered().reset();
  } else if (!registered()) {
    auto library = std::make_unique<torch::Library>(
        torch::Library::IMPL, "_c10d_functional", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library->impl("all_gather_into_tensor", all_gather_into_tensor);
    library->impl("all_gather_into_tensor_coalesced", all_gather_into_tensor_coalesced);
    registered() = std::move(library);
  }
}

}  // namespace dtensor_rules
