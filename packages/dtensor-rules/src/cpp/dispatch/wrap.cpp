#include "dtensor_rules/dispatch/wrap.h"

#include <ATen/ops/detach_ops.h>

#include "dtensor_rules/dispatch/kernels.h"
#include "dtensor_rules/dispatch/typed.h"

namespace dtensor_rules {

namespace {

// A storage without data: it only says which wrappers alias one another, and on which device. Torch
// gives a wrapper its local tensor's offset, and room for it.
c10::Storage empty_storage(const at::Tensor& local, const Spec& spec) {
  static auto* meta = c10::GetAllocator(c10::kMeta);
  const size_t before = spec.nbytes == 0 ? 0 : local.storage_offset() * local.element_size();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), before + spec.nbytes,
      at::DataPtr(nullptr, local.device()), meta, /*resizable=*/true));
}

using Detach = at::_ops::detach;
using DetachKernel = Typed<Detach::schema>::AtPython;

// Found once: operators outlive their kernels. Needs the GIL.
Operator* detach_operator() {
  static Operator* op = nullptr;
  if (op == nullptr) {
    op = find_operator("aten.detach.default");
  }
  return op != nullptr && op->installed ? op : nullptr;
}

// A DTensor as `detach()` below autograd makes it, by aten.detach's plan; null where the library may
// not run it now. Takes the GIL.
c10::intrusive_ptr<c10::TensorImpl> detached(const c10::TensorImpl& dtensor) {
  if (!gate_is_open() || c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    return {};
  }
  const Gil gil;  // once for all that follows
  Operator* op = detach_operator();
  if (op == nullptr) {
    return {};
  }
  auto* impl = const_cast<c10::TensorImpl*>(&dtensor);
  const at::Tensor tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(impl));
  return DetachKernel(op, &Detach::call)({}, tensor).getIntrusivePtr();
}

// A DTensor's tensor. It differs from torch's own only in how it is copied for autograd, which saves
// the results that backward needs (softmax, rsqrt) as detached copies: torch asks Python for a
// `detach` each time, at many times the cost of the operator.
class DTensorImpl final : public at::TensorImpl {
 public:
  using at::TensorImpl::TensorImpl;

  c10::intrusive_ptr<at::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version, bool allow_metadata_change) const override {
    return copy(version, allow_metadata_change);
  }

  c10::intrusive_ptr<at::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version, bool allow_metadata_change) const override {
    return copy(std::move(version), allow_metadata_change);
  }

 private:
  template <class Version>
  c10::intrusive_ptr<at::TensorImpl> copy(Version&& version, bool allow_metadata_change) const {
    auto made = detached(*this);
    if (!made) {
      return at::TensorImpl::shallow_copy_and_detach(
          std::forward<Version>(version), allow_metadata_change);
    }
    made->set_version_counter(std::forward<Version>(version));
    made->set_allow_tensor_metadata_change(allow_metadata_change);
    return made;
  }
};

at::Tensor wrap_in(
    c10::Storage storage, at::Tensor local, const Spec& spec, PyObject* spec_object) {
  at::Tensor wrapper = at::detail::make_tensor<DTensorImpl>(
      std::move(storage), local.key_set().remove(c10::DispatchKey::ZeroTensor), local.dtype());
  c10::TensorImpl* impl = wrapper.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(spec.sizes, spec.strides, local.storage_offset());
  impl->set_python_dispatch(true);  // Wrap leaves that to its callers
  auto object =
      py::reinterpret_steal<py::object>(THPVariable_Wrap(wrapper, torch_classes().dtensor));
  PyObject* local_object = THPVariable_Wrap(std::move(local));
  if (local_object == nullptr || object.ptr() == nullptr) {
    throw py::error_already_set();
  }
  slot(object.ptr(), torch_classes().local_tensor_offset) = local_object;
  slot(object.ptr(), torch_classes().spec_offset) = Py_NewRef(spec_object);
  return wrapper;
}

}  // namespace

at::Tensor wrap(at::Tensor local, const Spec& spec) {
  return wrap(std::move(local), spec, spec.object.ptr());
}

at::Tensor wrap_view(at::Tensor local, const Spec& spec, const at::Tensor& base) {
  return wrap_in(base.storage(), std::move(local), spec, spec.object.ptr());
}

at::Tensor wrap(at::Tensor local, const Spec& spec, PyObject* spec_object) {
  c10::Storage storage = empty_storage(local, spec);
  return wrap_in(std::move(storage), std::move(local), spec, spec_object);
}

}  // namespace dtensor_rules
