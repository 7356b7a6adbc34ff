"""Parallel styles that torch lacks for Mixtral, after torchtitan/distributed/expert_parallel.py."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle


class NoParallel(ParallelStyle):
    """Replicates parameters as DTensors, for inputs that are DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class ExpertSharding(ParallelStyle):
    """Shards experts; every rank takes all tokens, and outputs are summed over the ranks.

    For transformers' modules with all experts in one parameter, which skip tokens that are routed
    to the index after the last expert.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = len(next(module.parameters())) // device_mesh.size()
        vars(module).update(num_experts=own, _is_expert_parallel=True)
        first = own * device_mesh.get_local_rank()
        module.register_forward_pre_hook(partial(self._begin, first))
        module.register_forward_hook(partial(self._end, device_mesh))
        return distribute_module(module, device_mesh, self._shard)

    def _shard(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter, mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(placed))

    def _begin(self, first: int, module: Any, inputs: tuple[DTensor, ...]) -> tuple[Tensor, ...]:
        for name, parameter in module.named_parameters(recurse=False):
            # Instance attributes take precedence over parameters.
            vars(module)[name] = parameter.to_local()
        summed = [Partial()]
        tokens, chosen, weights = (each.to_local(grad_placements=summed) for each in inputs)
        chosen = chosen - first
        chosen[(chosen < 0) | (chosen >= module.num_experts)] = module.num_experts
        return tokens, chosen, weights

    def _end(self, mesh: DeviceMesh, module: nn.Module, _: Any, output: Tensor) -> DTensor:
        for name, _ in module.named_parameters(recurse=False):
            del vars(module)[name]
        return DTensor.from_local(output, mesh, [Partial()], run_check=False)
