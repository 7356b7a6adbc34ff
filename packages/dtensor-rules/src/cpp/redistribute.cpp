#include "dtensor_rules/redistribute.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "dtensor_rules/torch.h"

namespace dtensor_rules {

namespace {

// The size of the pieces that torch.chunk makes, but for the last.
int64_t chunk_size(int64_t size, int64_t count) {
  return (size + count - 1) / count;
}

at::Tensor contiguous(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : tensor.contiguous();
}

// The first `size` of a dim; the tensor itself where it has no more.
at::Tensor cut(const at::Tensor& tensor, int64_t dim, int64_t size) {
  return tensor.size(dim) == size ? tensor : at::slice(tensor, dim, 0, size);
}

// Zeros at the end of a dim up to `size`; the tensor itself where it has that size.
at::Tensor pad(const at::Tensor& tensor, int64_t dim, int64_t size) {
  const int64_t missing = size - tensor.size(dim);
  if (missing == 0) {
    return tensor;
  }
  std::vector<int64_t> widths(2 * (tensor.dim() - dim), 0);  // the last dim's come first
  widths.back() = missing;
  return at::constant_pad_nd(tensor, widths, 0.0);
}

// This rank's piece of a dim, a view but where torch.chunk makes fewer pieces than there are ranks.
at::Tensor piece(const at::Tensor& tensor, int64_t dim, const Axis& axis) {
  const int64_t size = tensor.size(dim);
  const int64_t whole = chunk_size(size, axis.size());
  const int64_t start = whole * axis.rank();
  if (start < size || size == 0) {
    return at::slice(tensor, dim, start, std::min(start + whole, size));
  }
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[dim] = 0;
  return tensor.new_zeros(sizes);  // contiguous, whatever the strides of the others
}

// Pieces that lie one after another on dim 0, joined on `dim` instead.
at::Tensor join(const at::Tensor& gathered, int64_t count, int64_t dim) {
  if (dim == 0) {
    return gathered;
  }
  const at::IntArrayRef sizes = gathered.sizes();
  const bool in_order = sizes[0] == count &&
      std::all_of(sizes.begin() + 1, sizes.begin() + dim, [](int64_t size) { return size == 1; });
  if (!in_order) {
    return at::cat(at::chunk(gathered, count, 0), dim);
  }
  std::vector<int64_t> joined = sizes.vec();
  joined[dim] *= joined[0];
  joined[0] = 1;
  return gathered.view(joined);
}

at::Tensor gather(const at::Tensor& local, int64_t dim, const Axis& axis) {
  return join(all_gather(contiguous(local), axis), axis.size(), dim);
}

at::Tensor run(const AllGather& step, const at::Tensor& local) {
  const int64_t count = step.axis.size();
  if (step.size % count == 0) {
    const at::Tensor whole = gather(local, step.dim, step.axis);
    TORCH_CHECK(
        whole.size(step.dim) == step.size, "redistribute: the shards of dim ", step.dim, " make ",
        whole.size(step.dim), " where the spec says ", step.size);
    return whole;
  }
  const at::Tensor padded = pad(local, step.dim, chunk_size(step.size, count));
  return contiguous(cut(gather(padded, step.dim, step.axis), step.dim, step.size));
}

at::Tensor run(const ReduceScatter& step, const at::Tensor& local) {
  const int64_t count = step.axis.size();
  const int64_t size = local.size(step.dim);
  const int64_t whole = chunk_size(size, count);
  const at::Tensor input = contiguous(pad(contiguous(local), step.dim, whole * count));
  const at::Tensor reduced = reduce_scatter(
      step.dim == 0 ? input : at::cat(at::chunk(input, count, step.dim), 0), step.reduce_op,
      step.axis);
  const int64_t left = std::max<int64_t>(size - whole * step.axis.rank(), 0);
  return cut(reduced, step.dim, std::min(whole, left));
}

at::Tensor run(const AllReduce& step, const at::Tensor& local) {
  return all_reduce(local, step.reduce_op, step.axis);
}

at::Tensor run(const AllToAll& step, const at::Tensor& local) {
  const int64_t count = step.axis.size();
  const int64_t from_whole = chunk_size(step.from_size, count);
  const int64_t to_whole = chunk_size(step.to_size, count);
  at::Tensor input = local;
  // Of an even dim torch asks nothing, so that a local tensor that belies its spec is not padded.
  if (step.from_size % count != 0) {
    input = pad(input, step.from_dim, from_whole);
  }
  if (step.to_size % count != 0) {
    input = pad(input, step.to_dim, to_whole * count);
  }
  at::Tensor output = step.by_gather
      ? contiguous(piece(gather(input, step.from_dim, step.axis), step.to_dim, step.axis))
      : shard_dim_all_to_all(contiguous(input), step.from_dim, step.to_dim, step.axis);
  if (step.from_size % count != 0) {
    output = cut(output, step.from_dim, step.from_size);
  }
  if (step.to_size % count != 0) {
    const int64_t left = std::max<int64_t>(step.to_size - to_whole * step.axis.rank(), 0);
    output = cut(output, step.to_dim, std::min(to_whole, left));
  }
  return output;
}

at::Tensor run(const Chunk& step, const at::Tensor& local) {
  return piece(local, step.dim, step.axis).clone();
}

at::Tensor run(const Divide& step, const at::Tensor& local) {
  return at::div(local, step.divisor);
}

bool sends(const Step& step) {
  return !std::holds_alternative<Chunk>(step) && !std::holds_alternative<Divide>(step);
}

}  // namespace

Redistribution::Redistribution(std::vector<Step> steps)
    : steps_(std::move(steps)),
      communicates_(std::any_of(steps_.begin(), steps_.end(), sends)) {}

at::Tensor Redistribution::apply(const at::Tensor& local) const {
  // The collectives' autograd kernels are Python; nothing here is differentiated.
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor result = local;
  for (const Step& step : steps_) {
    result = std::visit([&](const auto& known) { return run(known, result); }, step);
  }
  return result;
}

}  // namespace dtensor_rules
