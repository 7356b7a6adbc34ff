#include "dtensor_rules/collectives.h"

#include <utility>
#include <variant>

#include "dtensor_rules/torch.h"

namespace dtensor_rules {

namespace {

// An operator whose last argument is the group: a string in torch's older minors, and Any (a name
// or a process group) in the newer ones. `Name` is how its kernel takes the string.
template <class Name, class... Middle>
class Collective {
 public:
  explicit Collective(const char* name) : handle_(find(name)) {}

  at::Tensor operator()(const at::Tensor& input, Middle... middle, const Axis& axis) const {
    if (const ByValue* by_value = std::get_if<ByValue>(&handle_)) {
      return by_value->call(input, std::forward<Middle>(middle)..., axis.group_value());
    }
    return std::get<ByName>(handle_).call(input, std::forward<Middle>(middle)..., axis.group());
  }

 private:
  using ByName = c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, Middle..., Name)>;
  using ByValue =
      c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, Middle..., const c10::IValue&)>;
  using Handle = std::variant<ByName, ByValue>;

  static Handle find(const char* name) {
    const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    if (op.schema().arguments().back().type()->kind() == c10::TypeKind::StringType) {
      return op.typed<at::Tensor(const at::Tensor&, Middle..., Name)>();
    }
    return op.typed<at::Tensor(const at::Tensor&, Middle..., const c10::IValue&)>();
  }

  Handle handle_;
};

at::Tensor wait(const at::Tensor& pending) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(pending);
}

}  // namespace

Axis::Axis(std::string group, int64_t size, int64_t rank)
    : group_(std::move(group)), group_value_(group_), size_(size), rank_(rank) {
  TORCH_CHECK_VALUE(
      0 <= rank && rank < size, "Axis: rank ", rank, " is outside an axis of ", size, " ranks");
}

at::Tensor all_gather(const at::Tensor& input, const Axis& axis) {
  static const Collective<std::string, int64_t> op("_c10d_functional::all_gather_into_tensor");
  return wait(op(input, axis.size(), axis));
}

at::Tensor reduce_scatter(const at::Tensor& input, const std::string& reduce_op, const Axis& axis) {
  static const Collective<std::string, std::string, int64_t> op(
      "_c10d_functional::reduce_scatter_tensor");
  return wait(op(input, reduce_op, axis.size(), axis));
}

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op, const Axis& axis) {
  static const Collective<std::string, std::string> op("_c10d_functional::all_reduce");
  return wait(op(input, reduce_op, axis));
}

at::Tensor shard_dim_all_to_all(
    const at::Tensor& input, int64_t gather_dim, int64_t shard_dim, const Axis& axis) {
  static const Collective<const std::string&, int64_t, int64_t> op("_dtensor::shard_dim_alltoall");
  return op(input, gather_dim, shard_dim, axis);  // the only one that waits by itself
}

}  // namespace dtensor_rules
