// Collectives of the simulated device, as NCCL has them: on a stream of their own, which waits for
// the caller's; `wait` makes the caller's stream wait, and not the host. gloo moves the data.
#include "process_group.h"

#include "state.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace sim {

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.device().type() == kType ? host_alias(tensor) : tensor;
}

Tensors on_host(const Tensors& tensors) {
  Tensors all;
  for (const auto& each : tensors) {
    all.push_back(on_host(each));
  }
  return all;
}

void report_tensor(const at::Tensor& tensor, Kind kind, const std::string& op) {
  if (!is_listened_to() || tensor.numel() == 0 || tensor.device().type() != kType) {
    return;
  }
  const auto first = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
  const auto storage = reinterpret_cast<uint64_t>(tensor.storage().data());
  const auto index = tensor.device().index();
  report({kind, index, current_stream(index).id(), storage, first, first + tensor.nbytes(), op});
}

// One collective, or several that were coalesced.
class Collective final : public c10d::Work {
 public:
  Collective(std::vector<WorkPtr> host, c10::Stream stream, c10::Event done, Tensors results,
             std::function<void()> finish)
      : host_(std::move(host)),
        stream_(stream),
        done_(std::move(done)),
        results_(std::move(results)),
        finish_(std::move(finish)) {}

  bool isCompleted() override {
    for (const auto& each : host_) {
      if (!each->isCompleted()) {
        return false;
      }
    }
    return true;
  }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { wait(kNoTimeout); }

  // The host waits for gloo, whose data the next operator reads; in the order that is checked only
  // the caller's stream waits.
  bool wait(std::chrono::milliseconds timeout) override {
    complete(timeout);
    done_.block(current_stream(current_device()));
    return true;
  }

  void complete(std::chrono::milliseconds timeout) {
    for (const auto& each : host_) {
      each->wait(timeout);
    }
    host_.clear();
    if (finish_) {
      finish_();
      finish_ = nullptr;
    }
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    complete(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(kType, current_device())});
    const auto before = exchange_stream(stream_);  // on which the results are complete
    future->markCompleted(c10::IValue(results_));
    exchange_stream(before);
    return future;
  }

 private:
  std::vector<WorkPtr> host_;
  c10::Stream stream_;
  c10::Event done_;
  Tensors results_;
  std::function<void()> finish_;
};

class Backend final : public c10d::Backend {
 public:
  Backend(c10::intrusive_ptr<c10d::Backend> host, int rank, int size)
      : c10d::Backend(rank, size), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto works = std::exchange(pending_, {});
    return works.empty() ? WorkPtr() : combined(std::move(works));
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors host = on_host(tensors);
    return run("broadcast", tensors, tensors, [&] { return host_->broadcast(host, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors host = on_host(tensors);
    auto plain = options;
    const auto finish = averaged(plain.reduceOp, host);
    return run("allreduce", tensors, tensors, [&] { return host_->allreduce(host, plain); }, finish);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<WorkPtr> works;
    for (auto& each : tensors) {
      Tensors one{each};
      works.push_back(allreduce(one, options));
    }
    return combined(std::move(works));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Tensors host = on_host(tensors);
    auto plain = options;
    const auto finish = averaged(plain.reduceOp, host);
    return run("reduce", tensors, tensors, [&] { return host_->reduce(host, plain); }, finish);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    require_equal("all_gather", outputs.at(0), inputs.at(0));
    std::vector<Tensors> host_outputs{on_host(outputs.at(0))};
    Tensors host_inputs = on_host(inputs);
    return run("allgather", inputs, outputs.at(0),
               [&] { return host_->allgather(host_outputs, host_inputs, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    at::Tensor host_output = on_host(output), host_input = on_host(input);
    return run("all_gather_into_tensor", {input}, {output},
               [&] { return host_->_allgather_base(host_output, host_input, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    std::vector<WorkPtr> works;
    for (size_t index = 0; index < outputs.size(); ++index) {
      works.push_back(_allgather_base(outputs[index], inputs[index], options));
    }
    return combined(std::move(works));
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    std::vector<Tensors> host_outputs;
    for (const auto& each : outputs) {
      host_outputs.push_back(on_host(each));
    }
    Tensors host_inputs = on_host(inputs);
    return run("gather", inputs, outputs.empty() ? Tensors{} : outputs.at(0),
               [&] { return host_->gather(host_outputs, host_inputs, options); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    std::vector<Tensors> host_inputs;
    for (const auto& each : inputs) {
      host_inputs.push_back(on_host(each));
    }
    Tensors host_outputs = on_host(outputs);
    return run("scatter", inputs.empty() ? Tensors{} : inputs.at(0), outputs,
               [&] { return host_->scatter(host_outputs, host_inputs, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    require_equal("reduce_scatter", inputs.at(0), outputs.at(0));
    Tensors host_outputs = on_host(outputs);
    std::vector<Tensors> host_inputs{on_host(inputs.at(0))};
    auto plain = options;
    const auto finish = averaged(plain.reduceOp, host_outputs);
    return run("reduce_scatter", inputs.at(0), outputs,
               [&] { return host_->reduce_scatter(host_outputs, host_inputs, plain); }, finish);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    at::Tensor host_output = on_host(output), host_input = on_host(input);
    auto plain = options;
    const auto finish = averaged(plain.reduceOp, {host_output});
    return run("reduce_scatter_tensor", {input}, {output},
               [&] { return host_->_reduce_scatter_base(host_output, host_input, plain); }, finish);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<WorkPtr> works;
    for (size_t index = 0; index < outputs.size(); ++index) {
      works.push_back(_reduce_scatter_base(outputs[index], inputs[index], options));
    }
    return combined(std::move(works));
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    at::Tensor host_output = on_host(output), host_input = on_host(input);
    return run("all_to_all_single", {input}, {output}, [&] {
      return host_->alltoall_base(host_output, host_input, output_sizes, input_sizes, options);
    });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    Tensors host_outputs = on_host(outputs), host_inputs = on_host(inputs);
    return run("all_to_all", inputs, outputs,
               [&] { return host_->alltoall(host_outputs, host_inputs, options); });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Tensors host = on_host(tensors);
    return run("send", tensors, {}, [&] { return host_->send(host, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    Tensors host = on_host(tensors);
    return run("recv", {}, tensors, [&] { return host_->recv(host, from, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return run("barrier", {}, {}, [&] { return host_->barrier(options); });
  }

 private:
  // gloo has no average: it adds, and the results are divided.
  std::function<void()> averaged(c10d::ReduceOp& op, Tensors results) {
    if (op != c10d::ReduceOp::AVG) {
      return {};
    }
    op = c10d::ReduceOp::SUM;
    return [results = std::move(results), size = getSize()] {
      for (const auto& each : results) {
        each.div_(size);
      }
    };
  }

  static void require_equal(const char* op, const Tensors& parts, const at::Tensor& whole) {
    for (const auto& each : parts) {
      TORCH_CHECK(each.numel() == whole.numel(), "simccl: ", op, ": expected tensors of ",
                  whole.numel(), " elements, as NCCL does, got one of ", each.numel());
    }
  }

  template <typename Start>
  WorkPtr run(const char* op, const Tensors& reads, const Tensors& writes, Start start,
              std::function<void()> finish = {}) {
    const auto index = current_device();
    if (!stream_) {
      stream_ = new_stream(index);
    }
    c10::Event issued(kType), done(kType);
    issued.record(current_stream(index));
    issued.block(*stream_);
    const auto before = exchange_stream(*stream_);
    for (const auto& each : reads) {
      report_tensor(each, Kind::kRead, op);
    }
    for (const auto& each : writes) {
      report_tensor(each, Kind::kWrite, op);
    }
    done.record(*stream_);
    exchange_stream(before);
    ++sequence_;
    auto work = c10::make_intrusive<Collective>(std::vector<WorkPtr>{start()}, *stream_,
                                                std::move(done), writes, std::move(finish));
    if (coalescing_) {
      pending_.push_back(work);
    }
    return work;
  }

  WorkPtr combined(std::vector<WorkPtr> works) {
    c10::Event done(kType);
    done.record(*stream_);
    Tensors results;
    for (const auto& each : works) {
      for (const auto& tensor : each->result()) {
        results.push_back(tensor);
      }
    }
    return c10::make_intrusive<Collective>(std::move(works), *stream_, std::move(done), results,
                                           nullptr);
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::optional<c10::Stream> stream_;
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<WorkPtr> pending_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& host,
                                               int rank, int size) {
  return c10::make_intrusive<Backend>(host, rank, size);
}

}  // namespace sim
