#include "dtensor_rules/wrap.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dtensor_rules {

namespace {

// A storage without data: it only says which wrappers alias one another, and on which device.
c10::Storage empty_storage(const at::Tensor& local, const Spec& spec) {
  static auto* meta = c10::GetAllocator(c10::kMeta);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), spec.nbytes, at::DataPtr(nullptr, local.device()), meta,
      /*resizable=*/true));
}

c10::DispatchKeySet keys_of(const at::Tensor& local) {
  const auto keys = local.key_set();
  c10::DispatchKeySet wrapper(local.options().computeDispatchKey());
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    if (keys.has(key)) [[unlikely]] {
      wrapper = wrapper.add(key);
    }
  }
  return wrapper;
}

at::Tensor wrap_in(c10::Storage storage, const at::Tensor& local, const Spec& spec) {
  at::Tensor wrapper = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), keys_of(local), local.dtype());
  wrapper.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides);
  wrapper.unsafeGetTensorImpl()->set_python_dispatch(true);  // Wrap leaves that to its callers
  auto object =
      py::reinterpret_steal<py::object>(THPVariable_Wrap(wrapper, torch_classes().dtensor));
  PyObject* local_object = THPVariable_Wrap(local);
  if (local_object == nullptr || object.ptr() == nullptr) {
    throw py::error_already_set();
  }
  slot(object.ptr(), torch_classes().local_tensor_offset) = local_object;
  slot(object.ptr(), torch_classes().spec_offset) = py::object(spec.object).release().ptr();
  return wrapper;
}

}  // namespace

at::Tensor wrap(const at::Tensor& local, const Spec& spec) {
  return wrap_in(empty_storage(local, spec), local, spec);
}

at::Tensor wrap_view(const at::Tensor& local, const Spec& spec, const at::Tensor* base) {
  at::Tensor view =
      wrap_in(base != nullptr ? base->storage() : empty_storage(local, spec), local, spec);
  view.unsafeGetTensorImpl()->set_storage_offset(local.storage_offset());
  return view;
}

}  // namespace dtensor_rules
