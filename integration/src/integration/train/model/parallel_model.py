"""Builds the model of a configuration, parallelizes it and initialises its weights."""

import hashlib
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from integration.models import (
    RouterSize,
    build_model,
    build_model_on_meta,
    draw_weights,
    routers_of,
)
from integration.train.config import DIST_RNG_RANDOM, router_options_of
from integration.train.launch.world import World
from integration.train.model.activation_checkpointing import recompute_activations
from integration.train.model.compiled import compile_layers
from integration.train.model.precision import use_precision
from integration.train.setup import Setup


@dataclass(frozen=True)
class ParallelModel:
    """A model as its system has wrapped it.

    Attributes:
        parameters: number of elements of all parameters of the full model.
        routers: of the full model, by their paths there.
    """

    model: nn.Module
    parameters: int
    routers: dict[str, RouterSize]


def parallel_model(setup: Setup, world: World) -> ParallelModel:
    """Builds the model, parallelizes it and initialises its weights; all ranks call it."""
    config = setup.config
    if config.random == DIST_RNG_RANDOM:
        import dist_rng  # on use, as without it torch's random numbers must not change

        dist_rng.install()
    shape, system = setup.shape, setup.system
    # A model whose weights are loaded afterwards need not be built unsharded.
    sharded = config.init == "sharded" or setup.initial is not None
    deferred = sharded and system.accepts_deferred_init
    on_meta = sharded and not deferred and system.accepts_meta_model and shape.can_reinitialize
    if deferred:
        from plan_api import deferred_init

        model = deferred_init(lambda: build_model(shape, seed=config.seed, dropout=config.dropout))
    elif on_meta:
        model = build_model_on_meta(shape, dropout=config.dropout)
    else:
        model = build_model(shape, seed=config.seed, dropout=config.dropout)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    routers = {path: RouterSize.of(router) for path, router in routers_of(model).items()}
    if not system.plans_layers:
        layers = shape.layers_of(model)
        recompute_activations(
            layers, config.activation_checkpointing, every=config.activation_checkpointing_every
        )
        compile_layers(layers, config.compile)
        use_precision(model, system.layer_policies, system.device.type)
    if not (on_meta or deferred):
        model.to(system.device.current)
        if setup.initial is not None:
            setup.initial.load(model)
    if config.pp_degree == 1:  # else stages have their own
        router_options_of(config).install(model)
    model = system.parallelize(model, shape, world.size)
    if on_meta:
        if setup.initial is None:
            draw_weights(model, seed=config.seed, device=system.device.type)
        else:
            setup.initial.allocate(model, system.device.type)
    if setup.initial is not None and (on_meta or deferred):
        setup.initial.load(model)
    return ParallelModel(model, parameters, routers)


def weights_hash(model: nn.Module) -> str:
    """Returns the SHA-256 of all weights, in the order of their names; it gathers them."""
    digest = hashlib.sha256()
    # Without cpu_offload, with which FSDP1 on the CPU frees the gathered parameters.
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    for name in sorted(weights):
        weight = weights[name]
        assert isinstance(weight, Tensor)
        digest.update(name.encode() + weight.cpu().numpy().tobytes())
    return digest.hexdigest()
