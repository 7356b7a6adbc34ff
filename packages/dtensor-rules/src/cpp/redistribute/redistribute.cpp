#include "dtensor_rules/redistribute/redistribute.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "dtensor_rules/compat.h"

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

// How many elements are moved by one copy of a transposed view. It costs the same for any number of
// pieces; torch's way, a view of each and a concatenation, is faster per element on some devices.
constexpr int64_t kFewElements = 1 << 16;

// A contiguous (rows, columns, run) as a contiguous (columns, rows, run) of another shape.
at::Tensor interchange(
    const at::Tensor& tensor, int64_t rows, int64_t columns, int64_t run, at::IntArrayRef shape) {
  const at::Tensor result = at::empty(shape, tensor.options());
  at::as_strided(result, {columns, rows, run}, {rows * run, run, 1})
      .copy_(at::as_strided(tensor, {columns, rows, run}, {run, columns * run, 1}));
  return result;
}

// Pieces that lie one after another on dim 0, joined on `dim` instead.
at::Tensor join(const at::Tensor& gathered, int64_t count, int64_t dim) {
  if (dim == 0) {
    return gathered;
  }
  const at::IntArrayRef sizes = gathered.sizes();
  const int64_t rows = c10::multiply_integers(sizes.begin(), sizes.begin() + dim) / count;
  std::vector<int64_t> joined = sizes.vec();
  joined[0] /= count;
  joined[dim] *= count;
  if (rows == 1) {
    return gathered.view(joined);
  }
  if (gathered.numel() > kFewElements) {
    return at::cat(at::chunk(gathered, count, 0), dim);
  }
  const int64_t run = c10::multiply_integers(sizes.begin() + dim, sizes.end());
  return interchange(gathered, count, rows, run, joined);
}

// The inverse: what lies one after another on `dim`, on dim 0 instead.
at::Tensor pieces_first(const at::Tensor& whole, int64_t count, int64_t dim) {
  if (dim == 0) {
    return whole;
  }
  if (whole.numel() > kFewElements) {
    return at::cat(at::chunk(whole, count, dim), 0);
  }
  const at::IntArrayRef sizes = whole.sizes();
  const int64_t rows = c10::multiply_integers(sizes.begin(), sizes.begin() + dim);
  const int64_t run = c10::multiply_integers(sizes.begin() + dim, sizes.end()) / count;
  std::vector<int64_t> pieces = sizes.vec();
  pieces[0] *= count;
  pieces[dim] /= count;
  return interchange(whole, rows, count, run, pieces);
}

// The same where each piece holds `parts` parts of `dim`, whose runs of all ranks belong together.
at::Tensor join_parts(const at::Tensor& gathered, int64_t count, int64_t dim, int64_t parts) {
  const at::IntArrayRef sizes = gathered.sizes();
  if (dim == 0) {
    const int64_t run = c10::multiply_integers(sizes) / (count * parts);
    return interchange(gathered, count, parts, run, sizes);
  }
  const int64_t rows = c10::multiply_integers(sizes.begin(), sizes.begin() + dim) / count;
  const int64_t run = c10::multiply_integers(sizes.begin() + dim, sizes.end()) / parts;
  std::vector<int64_t> joined = sizes.vec();
  joined[0] /= count;
  joined[dim] *= count;
  return interchange(gathered, count, rows * parts, run, joined);
}

at::Tensor gather(const at::Tensor& local, int64_t dim, const Axis& axis) {
  return join(all_gather(contiguous(local), axis), axis.size(), dim);
}

void check_size(const at::Tensor& whole, int64_t dim, int64_t size) {
  TORCH_CHECK(
      whole.size(dim) == size, "redistribute: the shards of dim ", dim, " make ", whole.size(dim),
      " where the spec says ", size);
}

at::Tensor run(const AllGather& step, const at::Tensor& local) {
  const int64_t count = step.axis.size();
  if (step.size % count == 0) {
    const at::Tensor whole = gather(local, step.dim, step.axis);
    check_size(whole, step.dim, step.size);
    return whole;
  }
  const at::Tensor padded = pad(local, step.dim, chunk_size(step.size, count));
  const at::Tensor whole = cut(gather(padded, step.dim, step.axis), step.dim, step.size);
  return kCutGatheredIsCopied ? contiguous(whole) : whole;
}

at::Tensor run(const ReduceScatter& step, const at::Tensor& local) {
  const int64_t count = step.axis.size();
  const int64_t size = local.size(step.dim);
  const int64_t whole = chunk_size(size, count);
  const at::Tensor input = contiguous(pad(contiguous(local), step.dim, whole * count));
  const at::Tensor reduced =
      reduce_scatter(pieces_first(input, count, step.dim), step.reduce_op, step.axis);
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
  // Torch does not look at an even dim: a local tensor of another size than its spec says is not
  // padded.
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

at::Tensor run(const StridedGather& step, const at::Tensor& local) {
  const at::Tensor gathered = all_gather(contiguous(local), step.axis);
  const int64_t count = step.axis.size();
  const at::Tensor whole = join_parts(gathered, count, step.dim, step.split_factor);
  check_size(whole, step.dim, step.size);
  return whole;
}

// The sizes with each -1 replaced, in turn, by the next of `others`.
std::vector<int64_t> filled(std::vector<int64_t> sizes, const std::vector<int64_t>& others) {
  auto next = others.begin();
  for (int64_t& size : sizes) {
    size = size == -1 ? *next++ : size;
  }
  return sizes;
}

at::Tensor run(const MultiAxisGather& step, const at::Tensor& local) {
  const auto dims = static_cast<int64_t>(step.shard.size());
  TORCH_CHECK(
      local.dim() == dims, "redistribute: a shard of ", local.dim(), " dims where the spec says ",
      dims);
  std::vector<int64_t> others;
  for (int64_t dim = 0; dim < dims; ++dim) {
    if (step.shard[dim] == -1) {
      others.push_back(local.size(dim));
      continue;
    }
    TORCH_CHECK(
        local.size(dim) == step.shard[dim], "redistribute: a shard of dim ", dim, " has size ",
        local.size(dim), " where the spec says ", step.shard[dim]);
  }
  const at::Tensor gathered = all_gather(contiguous(local), step.axis);
  const at::Tensor blocks = gathered.view(filled(step.blocks, others));
  return contiguous(blocks.permute(step.order)).view(filled(step.sizes, others));
}

at::Tensor run(const StridedChunk& step, const at::Tensor& local) {
  const int64_t count = step.axis.size();
  const int64_t parts = step.split_factor;
  const int64_t piece_size = local.size(step.dim) / (parts * count);
  TORCH_CHECK(
      piece_size * parts * count == local.size(step.dim), "redistribute: dim ", step.dim, " of ",
      local.size(step.dim), " makes no equal pieces for ", parts, " parts on ", count, " ranks");
  std::vector<at::Tensor> pieces;
  pieces.reserve(parts);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t start = (part * count + step.axis.rank()) * piece_size;
    pieces.push_back(at::slice(local, step.dim, start, start + piece_size));
  }
  return at::cat(pieces, step.dim);
}

at::Tensor run(const Divide& step, const at::Tensor& local) {
  return at::div(local, step.divisor);
}

bool sends(const Step& step) {
  return !std::holds_alternative<Chunk>(step) && !std::holds_alternative<StridedChunk>(step) &&
      !std::holds_alternative<Divide>(step);
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
