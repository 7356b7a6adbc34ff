// Operators: tensors are made and viewed here, everything else runs on the host.
#include "state.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <vector>

namespace at::native {

// Attention has the host's kernels, and so its bits.
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &_fused_sdp_choice_cpp)

}  // namespace at::native

namespace sim {

namespace {

uint64_t begin_of(const at::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
}

// The bytes between a tensor's first and last element.
std::pair<uint64_t, uint64_t> range_of(const at::Tensor& tensor) {
  const uint64_t first = begin_of(tensor);
  if (tensor.numel() == 0) {
    return {first, first};
  }
  int64_t reach = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    reach += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto item = static_cast<int64_t>(tensor.element_size());
  return {first, first + static_cast<uint64_t>((reach + 1) * item)};
}

void report_access(const at::Tensor& tensor, Kind kind, const std::string& op) {
  if (!is_listened_to() || tensor.numel() == 0) {
    return;
  }
  const auto [first, last] = range_of(tensor);
  const auto device = tensor.device().index();
  const auto storage = reinterpret_cast<uint64_t>(tensor.storage().data());
  report({kind, device, current_stream(device).id(), storage, first, last, op});
}

bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// One call of the fallback.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), count_(op.schema().arguments().size()) {}

  void run() {
    const size_t first = stack_->size() - count_;
    for (size_t index = 0; index < count_; ++index) {
      const auto* alias = op_.schema().arguments()[index].alias_info();
      written_ = alias != nullptr && alias->isWrite();
      (*stack_)[first + index] = to_host((*stack_)[first + index]);
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (const auto& each : pairs_) {
      if (each.written) {
        take_back(each);
      }
    }
    if (generator_.defined()) {
      const std::scoped_lock lock(generator_.mutex());
      generator_.set_state(host_generator_.get_state());
    }
    const size_t returns = op_.schema().returns().size();
    const size_t base = stack_->size() - returns;
    for (size_t index = 0; index < returns; ++index) {
      (*stack_)[base + index] = to_device((*stack_)[base + index]);
    }
  }

 private:
  struct Pair {
    at::Tensor device;
    at::Tensor host;
    bool written;
  };

  at::Tensor host_of(const at::Tensor& tensor) {
    if (!is_sim(tensor)) {
      return tensor;
    }
    if (!index_) {
      index_ = tensor.device().index();
    }
    at::Tensor host = host_alias(tensor);
    report_access(tensor, written_ ? Kind::kWrite : Kind::kRead, op_.schema().name());
    pairs_.push_back({tensor, host, written_});
    return host;
  }

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) {
      return host_of(value.toTensor());
    }
    if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector()) {
        all.push_back(host_of(each));
      }
      return c10::IValue(all);
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
        all.push_back(each ? std::optional<at::Tensor>(host_of(*each)) : std::nullopt);
      }
      return c10::IValue(all);
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      const auto index = value.toDevice().index();
      index_ = index < 0 ? current_device() : index;
      return c10::IValue(c10::Device(c10::DeviceType::CPU));
    }
    if (value.isGenerator() && value.toGenerator().device().type() == kType) {
      generator_ = value.toGenerator();
      host_generator_ = at::detail::createCPUGenerator();
      host_generator_.set_state(generator_.get_state());
      return c10::IValue(host_generator_);
    }
    return value;
  }

  // The results of a call that has resized what it writes.
  static void take_back(const Pair& pair) {
    if (pair.host.const_data_ptr() == pair.device.const_data_ptr() &&
        pair.host.sizes() == pair.device.sizes() && pair.host.strides() == pair.device.strides()) {
      return;
    }
    if (pair.host.numel() == 0 && pair.device.numel() == 0 &&
        pair.host.sizes() == pair.device.sizes()) {
      return;
    }
    pair.device.resize_(pair.host.sizes());
    if (!pair.host.is_contiguous()) {
      pair.device.as_strided_(pair.host.sizes(), pair.host.strides());
    }
    host_alias(pair.device).copy_(pair.host);
  }

  at::Tensor device_of(const at::Tensor& host) {
    if (!host.defined() || host.device().type() != c10::DeviceType::CPU) {
      return host;
    }
    for (const auto& each : pairs_) {
      if (each.host.is_same(host)) {
        return each.device;
      }
    }
    const uint64_t address = begin_of(host);
    for (const auto& each : pairs_) {  // a view
      const auto storage = reinterpret_cast<uint64_t>(each.device.storage().data());
      const uint64_t end = storage + each.device.storage().nbytes();
      if (host.numel() != 0 && storage <= address && address < end) {
        at::Tensor view = at::empty({0}, each.device.options().dtype(host.scalar_type()));
        const auto offset = static_cast<int64_t>((address - storage) / host.element_size());
        view.set_(each.device.storage(), offset, host.sizes(), host.strides());
        return view;
      }
    }
    at::Tensor made = copy_to_device(host, index_.value_or(current_device()));
    report_access(made, Kind::kWrite, op_.schema().name());
    return made;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) {
      return device_of(value.toTensor());
    }
    if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector()) {
        all.push_back(device_of(each));
      }
      return c10::IValue(all);
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  size_t count_;
  bool written_ = false;
  std::optional<c10::DeviceIndex> index_;
  std::vector<Pair> pairs_;
  at::Generator generator_;
  at::Generator host_generator_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostCall(op, stack).run();
}

c10::DispatchKeySet keys() {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, c10::GetAllocator(kType), keys(),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kType), keys(),
                                           c10::dtype_or_default(dtype));
}

void wait_for_host(const at::Tensor& device) {
  const auto index = device.device().index();
  report({Kind::kSyncStream, index, current_stream(index).id(), 0, 0, 0, "copy"});
}

// The host's tensor, conjugated or negated lazily as the device's is.
at::Tensor with_lazy_bits(const at::Tensor& tensor) {
  if (!is_sim(tensor)) {
    return tensor;
  }
  at::Tensor host = host_alias(tensor);
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (is_sim(self)) {
    report_access(self, Kind::kRead, "copy");
  }
  if (is_sim(to)) {
    report_access(to, Kind::kWrite, "copy");
  }
  with_lazy_bits(to).copy_(with_lazy_bits(self));
  // Between devices nobody waits; with the host, a copy that may not block needs pinned memory.
  if (is_sim(self) != is_sim(to) && !(non_blocking && (is_sim(self) ? to : self).is_pinned())) {
    wait_for_host(is_sim(self) ? self : to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  report_access(self, Kind::kRead, "item");
  wait_for_host(self);
  return at::_local_scalar_dense(host_alias(self));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_source(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset,
                               c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// What follows is not the host's operator of the same name: arguments and results move here.

at::Tensor read_on_host(const at::Tensor& tensor, const char* op) {
  report_access(tensor, Kind::kRead, op);
  return host_alias(tensor);
}

at::Tensor written_by(const at::Tensor& host, c10::DeviceIndex index, const char* op) {
  at::Tensor made = copy_to_device(host, index);
  report_access(made, Kind::kWrite, op);
  return made;
}

// Counts integers too, as CUDA's does and the host's does not.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min,
                 const at::Scalar& max) {
  const at::Tensor host = read_on_host(self, "histc");
  const at::Tensor counts = at::histc(at::isFloatingType(host.scalar_type()) ? host : host.to(at::kDouble),
                                      bins, min, max);
  return written_by(counts.to(self.scalar_type()), self.device().index(), "histc");
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const char* op = "convolution";
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) {
    host_bias = read_on_host(*bias, op);
  }
  const at::Tensor result = at::convolution_symint(
      read_on_host(input, op), read_on_host(weight, op), host_bias, stride, padding, dilation,
      transposed, output_padding, groups);
  return written_by(result, input.device().index(), op);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> mask) {
  const char* op = "convolution_backward";
  const c10::SymInt channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  const std::vector<c10::SymInt> bias{channels};
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward_symint(
      read_on_host(grad, op), read_on_host(input, op), read_on_host(weight, op),
      at::OptionalSymIntArrayRef(bias), stride, padding, dilation, transposed, output_padding,
      groups, mask);
  const auto index = input.device().index();
  const auto on_device = [&](const at::Tensor& each) {
    return each.defined() ? written_by(each, index, op) : at::Tensor();
  };
  return std::make_tuple(on_device(grad_input), on_device(grad_weight), on_device(grad_bias));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  const auto storage = reinterpret_cast<uint64_t>(self.storage().data());
  report({Kind::kUse, stream.device_index(), stream.id(), storage, 0, 0, "record_stream"});
}

}  // namespace

at::Tensor host_alias(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) {  // may be an `out` that the operator resizes
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  const c10::Storage storage = tensor.storage();
  at::Tensor host = at::from_blob(
      tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [storage](void*) {}, options);
  if (tensor.is_conj()) {
    host._set_conj(true);
  }
  if (tensor.is_neg()) {
    host._set_neg(true);
  }
  return host;
}

at::Tensor copy_to_device(const at::Tensor& host, c10::DeviceIndex index) {
  const auto options =
      at::TensorOptions().dtype(host.scalar_type()).device(c10::Device(kType, index));
  at::Tensor made = host.is_non_overlapping_and_dense()
                        ? at::empty_strided(host.sizes(), host.strides(), options)
                        : at::empty(host.sizes(), options);
  if (host.numel() != 0) {
    host_alias(made).copy_(host);
  }
  return made;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_source);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("histc", histc);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // Operators that torch would make of others for a device without kernels of its own, with other
  // bits, where the host has kernels of them.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    const bool is_composite =
        op && (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
               op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
               op->hasKernelForDispatchKey(
                   c10::DispatchKey::CompositeExplicitAutogradNonFunctional));
    if (is_composite && name.getNamespace() == "aten" &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
}

// Under autocast the host's matrix products and attention, in the dtype of the context.
// torch's fallback resolves lazy bits by a copy, which is this operator again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(addbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

}  // namespace sim
