#include "dtensor_rules/dispatch/detached.h"

#include <ATen/ops/detach_ops.h>

#include "dtensor_rules/dispatch/kernels.h"
#include "dtensor_rules/dispatch/typed.h"

namespace dtensor_rules {

namespace {

using Detach = at::_ops::detach;
using Kernel = Typed<Detach::schema>::AtPython;

// Found once: operators outlive their kernels. Needs the GIL.
Operator* detach_operator() {
  static Operator* op = nullptr;
  if (op == nullptr) {
    op = find_operator("aten.detach.default");
  }
  return op != nullptr && op->installed ? op : nullptr;
}

}  // namespace

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
  return Kernel(op, &Detach::call)({}, tensor).getIntrusivePtr();
}

}  // namespace dtensor_rules
