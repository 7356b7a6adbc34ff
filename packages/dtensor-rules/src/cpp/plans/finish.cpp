#include "dtensor_rules/plans/finish.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace dtensor_rules {

c10::IValue PythonFinish::apply(const c10::IValue& local) const {
  return torch::jit::toIValue(function_(torch::jit::toPyObject(local)), type_);
}

LogicalAnd::LogicalAnd(std::string group_name, const std::string& device)
    : group_name_(std::move(group_name)), device_(device) {}

c10::IValue LogicalAnd::apply(const c10::IValue& local) const {
  const py::gil_scoped_release others_run;
  // The minimum of the numbers that torch's own dispatch reduces: int64, and no bool.
  std::vector<at::Tensor> number = {
      at::full({}, static_cast<int64_t>(local.toBool()), at::TensorOptions(device_).dtype(at::kLong))};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MIN;
  c10d::resolve_process_group(group_name_)->allreduce(number, options)->wait();
  return number[0].item<int64_t>() != 0;
}

}  // namespace dtensor_rules
