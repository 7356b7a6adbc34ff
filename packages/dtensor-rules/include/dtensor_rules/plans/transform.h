// What may happen to a local tensor before the operator: a redistribution, or a rule's own step.
#pragma once

#include <memory>

#include "dtensor_rules/python.h"

namespace dtensor_rules {

class Transform {
 public:
  virtual ~Transform() = default;
  // Called below autograd, and without the GIL where `communicates`, with it otherwise.
  virtual at::Tensor apply(const at::Tensor& local) const = 0;
  // Whether other ranks have to take part, so that other threads should run meanwhile.
  virtual bool communicates() const = 0;
};

// Applies it with the GIL given up where other threads should run. Needs the GIL.
inline at::Tensor transformed(const Transform& transform, const at::Tensor& local) {
  if (!transform.communicates()) {
    return transform.apply(local);
  }
  const py::gil_scoped_release others_run;
  return transform.apply(local);
}

using TransformPtr = std::shared_ptr<const Transform>;

// A Python function of the local tensor: redistributions that C++ does not know, rules of users.
class PythonTransform final : public Transform {
 public:
  explicit PythonTransform(py::object function) : function_(std::move(function)) {}
  at::Tensor apply(const at::Tensor& local) const override {
    return py::cast<at::Tensor>(function_(local));
  }
  bool communicates() const override { return false; }  // it holds the GIL itself

 private:
  py::object function_;
};

}  // namespace dtensor_rules
