// The functional collectives that DTensor issues, called through the dispatcher and waited for.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace dtensor_rules {

// One axis of a mesh as this rank sees it: the ranks along it, and which of them it is.
class Axis {
 public:
  // `group` names the process group of the axis; empty where nothing is sent.
  Axis(std::string group, int64_t size, int64_t rank);

  const std::string& group() const { return group_; }
  const c10::IValue& group_value() const { return group_value_; }
  int64_t size() const { return size_; }
  int64_t rank() const { return rank_; }

 private:
  std::string group_;
  c10::IValue group_value_;  // what the operators take, so that no call makes a string
  int64_t size_;
  int64_t rank_;
};

// Each returns a tensor that is ready to be used, and takes a contiguous input, except all_reduce.

// Shards one after another on dim 0: (d0, ...) to (size * d0, ...).
at::Tensor all_gather(const at::Tensor& input, const Axis& axis);

// This rank's piece on dim 0: (size * d0, ...) to (d0, ...).
at::Tensor reduce_scatter(const at::Tensor& input, const std::string& reduce_op, const Axis& axis);

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op, const Axis& axis);

// Gathers dim `gather_dim` and scatters dim `shard_dim`, of which the axis' size is a divisor.
at::Tensor shard_dim_all_to_all(
    const at::Tensor& input, int64_t gather_dim, int64_t shard_dim, const Axis& axis);

}  // namespace dtensor_rules
