#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dtensor_rules/redistribute/redistribute.h"
#include "dtensor_rules/register.h"
#include "dtensor_rules/torch.h"

namespace dtensor_rules {

namespace {

std::string text(const Axis& axis) {
  std::ostringstream out;
  out << "Axis(group='" << axis.group() << "', size=" << axis.size() << ", rank=" << axis.rank()
      << ")";
  return out.str();
}

std::string text(const AllGather& step) {
  std::ostringstream out;
  out << "all_gather(dim=" << step.dim << ", size=" << step.size << ", axis=" << step.axis.size()
      << ")";
  return out.str();
}

std::string text(const ReduceScatter& step) {
  std::ostringstream out;
  out << "reduce_scatter(dim=" << step.dim << ", op=" << step.reduce_op
      << ", axis=" << step.axis.size() << ")";
  return out.str();
}

std::string text(const AllReduce& step) {
  std::ostringstream out;
  out << "all_reduce(op=" << step.reduce_op << ", axis=" << step.axis.size() << ")";
  return out.str();
}

std::string text(const AllToAll& step) {
  std::ostringstream out;
  out << (step.by_gather ? "all_to_all_by_gather(dim=" : "all_to_all(dim=") << step.from_dim
      << ", size=" << step.from_size << " to dim=" << step.to_dim << ", size=" << step.to_size
      << ", axis=" << step.axis.size() << ")";
  return out.str();
}

std::string text(const Chunk& step) {
  std::ostringstream out;
  out << "chunk(dim=" << step.dim << ", piece=" << step.axis.rank() << " of " << step.axis.size()
      << ")";
  return out.str();
}

std::string text(const StridedGather& step) {
  std::ostringstream out;
  out << "strided_gather(dim=" << step.dim << ", size=" << step.size
      << ", parts=" << step.split_factor << ", axis=" << step.axis.size() << ")";
  return out.str();
}

std::string text(const MultiAxisGather& step) {
  std::ostringstream out;
  out << "multi_axis_gather(sizes=" << at::IntArrayRef(step.sizes) << ", axis=" << step.axis.size()
      << ")";
  return out.str();
}

std::string text(const StridedChunk& step) {
  std::ostringstream out;
  out << "strided_chunk(dim=" << step.dim << ", parts=" << step.split_factor
      << ", piece=" << step.axis.rank() << " of " << step.axis.size() << ")";
  return out.str();
}

std::string text(const Divide& step) {
  return "divide(" + std::to_string(step.divisor) + ")";
}

std::string text(const Redistribution& plan) {
  std::string out = "Redistribution(";
  const char* separator = "";
  for (const Step& step : plan.steps()) {
    out += separator;
    out += std::visit([](const auto& known) { return text(known); }, step);
    separator = " -> ";
  }
  return out + ")";
}

// A class whose repr is `text`, and which Python cannot change.
template <class T>
auto bind(py::module_& module, const char* name, const char* doc) {
  return py::class_<T>(module, name, doc).def(
      "__repr__", [](const T& self) { return text(self); });
}

}  // namespace

void register_redistribute(py::module_& module) {
  bind<Axis>(module, "Axis", "One mesh axis as this rank sees it.")
      .def(py::init<std::string, int64_t, int64_t>(), py::kw_only(), py::arg("group"),
           py::arg("size"), py::arg("rank"));
  bind<AllGather>(module, "AllGather", "Shard(dim) to Replicate; size: of dim once gathered.")
      .def(py::init<Axis, int64_t, int64_t>(), py::arg("axis"), py::kw_only(), py::arg("dim"),
           py::arg("size"));
  bind<ReduceScatter>(module, "ReduceScatter", "Partial(reduce_op) to Shard(dim).")
      .def(py::init<Axis, int64_t, std::string>(), py::arg("axis"), py::kw_only(),
           py::arg("dim"), py::arg("reduce_op"));
  bind<AllReduce>(module, "AllReduce", "Partial(reduce_op) to Replicate.")
      .def(py::init<Axis, std::string>(), py::arg("axis"), py::kw_only(), py::arg("reduce_op"));
  bind<AllToAll>(module, "AllToAll", "Shard(from_dim) to Shard(to_dim); sizes: of whole dims.")
      .def(py::init<Axis, int64_t, int64_t, int64_t, int64_t, bool>(), py::arg("axis"),
           py::kw_only(), py::arg("from_dim"), py::arg("to_dim"), py::arg("from_size"),
           py::arg("to_size"), py::arg("by_gather"));
  bind<Chunk>(module, "Chunk", "Replicate to Shard(dim).")
      .def(py::init<Axis, int64_t>(), py::arg("axis"), py::kw_only(), py::arg("dim"));
  bind<StridedGather>(module, "StridedGather", "Equal pieces of a _StridedShard to Replicate.")
      .def(py::init<Axis, int64_t, int64_t, int64_t>(), py::arg("axis"), py::kw_only(),
           py::arg("dim"), py::arg("size"), py::arg("split_factor"));
  bind<MultiAxisGather>(module, "MultiAxisGather",
                        "Equal shards on several mesh axes to Replicate, by one gather.")
      .def(py::init<Axis, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>,
                    std::vector<int64_t>>(),
           py::arg("axis"), py::kw_only(), py::arg("shard"), py::arg("blocks"), py::arg("order"),
           py::arg("sizes"));
  bind<StridedChunk>(module, "StridedChunk", "Replicate to equal pieces of a _StridedShard.")
      .def(py::init<Axis, int64_t, int64_t>(), py::arg("axis"), py::kw_only(), py::arg("dim"),
           py::arg("split_factor"));
  bind<Divide>(module, "Divide", "Replicate to Partial('sum').")
      .def(py::init<int64_t>(), py::arg("divisor"));

  py::class_<Redistribution, Transform, std::shared_ptr<Redistribution>>(
      module, "Redistribution", "What this rank does to its local tensor to change its layout.")
      .def(py::init<std::vector<Step>>(), py::arg("steps"))
      .def_property_readonly("steps", &Redistribution::steps)
      .def("__repr__", [](const Redistribution& self) { return text(self); });
}

}  // namespace dtensor_rules
