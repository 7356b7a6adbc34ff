#include "dtensor_rules/redistribute/collectives.h"

#include "dtensor_rules/compat.h"

namespace dtensor_rules {

namespace {

template <class... Arguments>
c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, Arguments...)> find(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<at::Tensor(const at::Tensor&, Arguments...)>();
}

// As the operators of this torch take it.
const auto& group_of(const Axis& axis) {
  if constexpr (kGroupsAreValues) {
    return axis.group_value();
  } else {
    return axis.group();
  }
}

at::Tensor wait(const at::Tensor& pending) {
  static const auto op = find("_c10d_functional::wait_tensor");
  return op.call(pending);
}

}  // namespace

Axis::Axis(std::string group, int64_t size, int64_t rank)
    : group_(std::move(group)), group_value_(group_), size_(size), rank_(rank) {
  TORCH_CHECK_VALUE(
      0 <= rank && rank < size, "Axis: rank ", rank, " is outside an axis of ", size, " ranks");
}

at::Tensor all_gather(const at::Tensor& input, const Axis& axis) {
  static const auto op =
      find<int64_t, Group<std::string>>("_c10d_functional::all_gather_into_tensor");
  return wait(op.call(input, axis.size(), group_of(axis)));
}

at::Tensor reduce_scatter(const at::Tensor& input, const std::string& reduce_op, const Axis& axis) {
  static const auto op = find<std::string, int64_t, Group<std::string>>(
      "_c10d_functional::reduce_scatter_tensor");
  return wait(op.call(input, reduce_op, axis.size(), group_of(axis)));
}

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op, const Axis& axis) {
  static const auto op =
      find<AllReduceOperation, Group<std::string>>("_c10d_functional::all_reduce");
  return wait(op.call(input, reduce_op, group_of(axis)));
}

at::Tensor shard_dim_all_to_all(
    const at::Tensor& input, int64_t gather_dim, int64_t shard_dim, const Axis& axis) {
  static const auto op =
      find<int64_t, int64_t, Group<const std::string&>>("_dtensor::shard_dim_alltoall");
  // The only one that waits by itself.
  return op.call(input, gather_dim, shard_dim, group_of(axis));
}

}  // namespace dtensor_rules
