// What makes the result of a call out of the local operator's, where that is no tensor.
#pragma once

#include <memory>
#include <string>

#include "dtensor_rules/python.h"

namespace dtensor_rules {

class Finish {
 public:
  virtual ~Finish() = default;
  // Called with the GIL, which it may give up while it waits for other ranks.
  virtual c10::IValue apply(const c10::IValue& local) const = 0;
};

using FinishPtr = std::shared_ptr<const Finish>;

// A Python function of the local result; `type` is the operator's, for what it returns.
class PythonFinish final : public Finish {
 public:
  PythonFinish(py::object function, c10::TypePtr type)
      : function_(std::move(function)), type_(std::move(type)) {}
  c10::IValue apply(const c10::IValue& local) const override;

 private:
  py::object function_;
  c10::TypePtr type_;
};

// True where every rank of the group has True: one all-reduce of one number.
class LogicalAnd final : public Finish {
 public:
  // device: where the group's collectives run, as "cuda".
  LogicalAnd(std::string group_name, const std::string& device);
  c10::IValue apply(const c10::IValue& local) const override;

 private:
  std::string group_name_;
  c10::Device device_;
};

}  // namespace dtensor_rules
