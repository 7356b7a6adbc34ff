// A redistribution, planned once: what this rank does to its local tensor of one layout to hold its
// local tensor of another.
//
// Note: a redistribution is a sequence of steps, and a step changes the placement on one mesh axis,
// or gathers several at once. All but that one are the steps of
// torch.distributed.tensor._redistribute.redistribute_local_tensor, each with the operators that
// torch calls for it on values, so that results, strides, collectives and their order are the same.
// `dim` is a dim of the tensor, `axis` one of the mesh; a shard is the piece that torch.chunk makes,
// and empty where it makes fewer pieces than there are ranks.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "dtensor_rules/redistribute/collectives.h"
#include "dtensor_rules/plans/transform.h"

namespace dtensor_rules {

// Shard(dim) to Replicate.
struct AllGather {
  Axis axis;
  int64_t dim;
  int64_t size;  // of `dim` once gathered
};

// Partial(reduce_op) to Shard(dim).
struct ReduceScatter {
  Axis axis;
  int64_t dim;
  std::string reduce_op;
};

// Partial(reduce_op) to Replicate.
struct AllReduce {
  Axis axis;
  std::string reduce_op;
};

// Shard(from_dim) to Shard(to_dim).
struct AllToAll {
  Axis axis;
  int64_t from_dim;
  int64_t to_dim;
  int64_t from_size;  // of `from_dim` before it was sharded
  int64_t to_size;    // of `to_dim` before it is sharded
  bool by_gather;     // gather and chunk, as torch does where the backend has no all-to-all
};

// Replicate to Shard(dim).
struct Chunk {
  Axis axis;
  int64_t dim;
};

// _StridedShard(dim, split_factor) to Replicate, where all pieces are equal: the dim is split into
// `split_factor` parts, each part into a piece for each rank, and a rank's shard are its pieces.
struct StridedGather {
  Axis axis;
  int64_t dim;
  int64_t size;  // of `dim` once gathered
  int64_t split_factor;
};

// Replicate to _StridedShard(dim, split_factor), where all pieces are equal.
struct StridedChunk {
  Axis axis;
  int64_t dim;
  int64_t split_factor;
};

// Equal shards on several mesh axes to Replicate, by one gather over the ranks of all of them;
// src/dtensor_rules/gathers.py says where their elements belong. Dims that are not gathered have
// the size -1 in every list, and any size in the tensor.
struct MultiAxisGather {
  Axis axis;                    // the ranks of all axes
  std::vector<int64_t> shard;   // the sizes of a shard
  std::vector<int64_t> blocks;  // what is gathered, as a tensor of more dims: axes, then pieces
  std::vector<int64_t> order;   // the dims of `blocks` in the order in which they make the result
  std::vector<int64_t> sizes;   // of the result
};

// Replicate to Partial("sum"), and the mean that several axes are reduced to at once.
struct Divide {
  int64_t divisor;
};

// The first is one that can be made from nothing, as pybind11 asks of a variant.
using Step = std::variant<
    Divide, Chunk, StridedChunk, AllGather, StridedGather, MultiAxisGather, ReduceScatter,
    AllReduce, AllToAll>;

class Redistribution final : public Transform {
 public:
  explicit Redistribution(std::vector<Step> steps);

  // This rank's local tensor of the new layout; the given tensor itself where no step changes it.
  // Ignores autograd: it is called below it. Needs no GIL. Throws what the operators throw.
  at::Tensor apply(const at::Tensor& local) const override;

  // Whether some step sends anything.
  bool communicates() const override { return communicates_; }

  const std::vector<Step>& steps() const { return steps_; }

 private:
  std::vector<Step> steps_;
  bool communicates_;
};

}  // namespace dtensor_rules
