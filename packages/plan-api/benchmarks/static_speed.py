"""Steps of LLaMA, Mixtral and DiT, tensor-parallel: by hand, static, Eager, and native DTensor.

A step is forward, loss, backward, a fused AdamW and zero_grad, of two layers of 64 or 512 features
and 2 x 64 tokens. By hand and static compute and send the same, which is checked before anything
is timed. The floor is by hand with empty hooks on the modules that have hooks in static mode.
Generated is static mode with the plan of `generate_static`. Native is the plan's Eager mode with
dtensor-rules off: torch's dispatch under plan-api's hooks.
"""

import contextlib
import functools
import gc
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from by_hand import by_hand
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor_rules
from fsdp import fully_shard
from integration.models.dit import DiffusionLoss, DiT
from plan_api import generate_static, parallelize, zoo
from testkit import fake_mesh, models, run_ranks

sys.path.append(str(Path(__file__).parents[2] / "dtensor-rules" / "benchmarks"))
from python_dispatch import in_python

RANKS, HIDDEN, BATCH, TOKENS = 8, 64, 2, 64
WIDE, MOST_WIDE = 512, 1.02
MOST, MOST_OVER_FLOOR = 1.05, 0.02
NAMES = {"llama": "LLaMA", "mixtral": "Mixtral", "dit": "DiT"}
KINDS = ("hand", "static", "eager", "native")
ON_LOCAL_TENSORS = ("hand", "floor", "static", "generated")
# With one part more at a time (veScale, figures 11 and 12): the model's mode, and what is entered.
PARTS = {
    "native": ("eager", contextlib.nullcontext),
    "rules": ("eager", functools.partial(in_python, cached=False)),
    "cache": ("eager", functools.partial(in_python, cached=True)),
    "eager": ("eager", dtensor_rules.enabled),
    "static": ("static", dtensor_rules.enabled),
    "hand": ("hand", contextlib.nullcontext),
}


def build(name, kind, mesh, use=None, hidden=HIDDEN, **options):
    """A function that makes one step and gives its loss."""
    return _step_of(name, _parallel_model(name, kind, mesh, use, hidden, **options), _batch(name))


def _parallel_model(name, kind, mesh, use=None, hidden=HIDDEN, **options):
    model = _model(name, hidden)
    if kind == "hand":
        return by_hand(model, mesh)
    if kind == "floor":
        hooked = _parallel_model(name, "static", mesh, use, hidden, **options)
        return with_empty_hooks(by_hand(model, mesh), hooked)
    plan = getattr(zoo, name)(mesh, **options)
    plan = plan.under("model") if name == "dit" else plan
    if kind == "generated":
        plan = generate_static(plan, _model(name, hidden), _batch(name))
    mode = "eager" if kind in ("eager", "native") else "static"
    return parallelize(model, plan, mode=mode, guard_steps=0, use=use)


def with_empty_hooks(model, hooked):
    """Registers as many hooks that do nothing on each module as another model's has."""
    for name, of_other in hooked.named_modules():
        module = model.get_submodule(name)
        for key in of_other._forward_pre_hooks:
            if key in of_other._forward_pre_hooks_with_kwargs:
                module.register_forward_pre_hook(lambda _, args, kwargs: None, with_kwargs=True)
            else:
                module.register_forward_pre_hook(lambda _, args: None)
        for key in of_other._forward_hooks:
            if key in of_other._forward_hooks_with_kwargs:
                module.register_forward_hook(lambda _, args, kwargs, out: None, with_kwargs=True)
            else:
                module.register_forward_hook(lambda _, args, out: None)
    return model


def _step_of(name, model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        out = model(**batch)
        loss = out if name == "dit" else out.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _model(name, hidden=HIDDEN):
    if name == "dit":
        torch.manual_seed(0)
        model = DiffusionLoss(DiT(hidden_size=hidden, num_heads=8)).train()
        for param in model.parameters():  # its own closed gates would hide everything
            if param.requires_grad:
                torch.nn.init.normal_(param.data, std=0.05)
        return model
    return getattr(models, name)(
        hidden_size=hidden, intermediate_size=2 * hidden, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip


def _batch(name):
    torch.manual_seed(1)
    if name == "dit":
        images, noise = torch.randn(BATCH, 4, 8, 8), torch.randn(BATCH, 4, 8, 8)
        times, classes = torch.randint(0, 1000, (BATCH,)), torch.randint(0, 10, (BATCH,))
        return {"x": images, "t": times, "y": classes, "noise": noise}
    ids = torch.randint(0, models.VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids}


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def check_same(steps):
    """How many collectives a step makes; stops unless by hand and static run the same operators."""
    counted = {}
    for kind in sorted({"hand", "static", "generated"} & steps.keys()):
        steps[kind]()
        with _Counting() as counting:
            steps[kind]()
        counted[kind] = counting.counts
    hand = counted.pop("hand")
    for kind, static in counted.items():
        if hand != static:
            raise AssertionError(f"only by hand: {hand - static}; only {kind}: {static - hand}")
    return sum(n for op, n in hand.items() if "c10d" in op and "wait" not in op)


def rows():
    """One row a model and world, in milliseconds a step."""
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        return [
            _one_part_more(),
            *(_on_fake_mesh(name) for name in ("llama", "mixtral", "dit")),
            *(on_local_tensors(name, HIDDEN) for name in ("llama", "mixtral", "dit")),
            *(on_local_tensors(name, WIDE) for name in ("llama", "mixtral", "dit")),
            *(_on_two(name) for name in ("llama", "mixtral", "dit")),
            _fused_on_two(),
            _fully_sharded_on_fake_mesh(),
            _fully_sharded_on_four(),
        ]


def _on_fake_mesh(name, rounds=12):
    with fake_mesh((RANKS,), ("tp",)) as mesh, _one_core():
        steps = {kind: build(name, kind, mesh) for kind in KINDS}
        sent = check_same(steps)
        # Of this thread: what other processes do is not in it.
        times = _interleaved(steps, time.thread_time_ns, rounds)
    return _row(f"{NAMES[name]}, tp on {RANKS} simulated ranks", times, min) | {"collectives": sent}


def on_local_tensors(name, hidden, rounds=12):
    """Static mode, of a plan of the zoo and of a generated one, beside the code by hand."""
    with fake_mesh((RANKS,), ("tp",)) as mesh, _one_core():
        steps = {kind: build(name, kind, mesh, hidden=hidden) for kind in ON_LOCAL_TENSORS}
        if _makes_dtensors(steps["generated"]):
            del steps["generated"]
        sent = check_same(steps)
        times = _interleaved(steps, time.thread_time_ns, rounds)
    least = {kind: min(of_kind) for kind, of_kind in times.items()}
    times_hand = {kind: round(least[kind] / least["hand"], 3) for kind in steps if kind != "hand"}
    most = MOST_WIDE if hidden == WIDE else max(MOST, times_hand["floor"] + MOST_OVER_FLOOR)
    met = max(times_hand[kind] for kind in times_hand if kind != "floor") <= most
    return {
        "case": f"{NAMES[name]}, {hidden} features, tp on {RANKS} simulated ranks",
        **{f"{kind}_ms": round(one, 2) for kind, one in least.items()},
        **{f"{kind}_times_hand": one for kind, one in times_hand.items()},
        "most_static": round(most, 3), "met": "yes" if met else "no", "collectives": sent,
    }  # fmt: skip


def _makes_dtensors(step):
    """Whether a generated plan runs modules on DTensors.

    A rank with one head has its keys in the memory order of a product without a copy, where Eager
    copies them, as it would for all heads. Products of some processors (MKL on AMD's with AVX-512)
    have other last bits then, and `generate_static` keeps Eager's.
    """
    step()
    with _Counting() as counting:
        step()
    return any("_wrap_tensor" in op for op in counting.counts)


def _one_part_more(rounds=8, turns=10):
    times = {part: [] for part in PARTS}
    with fake_mesh((RANKS,), ("tp",)) as mesh, _one_core():
        steps = {part: build("llama", kind, mesh) for part, (kind, _) in PARTS.items()}
        dtensor_rules.disable()
        for _ in range(rounds):
            for part, (_, entered) in PARTS.items():
                with entered():
                    _turns({part: steps[part]}, time.thread_time_ns, turns, 3, times)
    dtensor_rules.enable()
    return {"case": "LLaMA, one part more at a time"} | {
        f"{part}_ms": round(min(times[part]), 2) for part in PARTS
    }


def _on_two(name):
    (times, sent), _ = run_ranks(_rank, 2, name, timeout=300)
    return _row(f"{NAMES[name]}, tp on 2 gloo ranks", times, statistics.median) | {
        "collectives": sent
    }


def _rank(name, rounds=8):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    steps = {kind: build(name, kind, mesh) for kind in KINDS}
    losses = {}
    for kind in ("hand", "static"):
        torch.manual_seed(3)
        losses[kind] = [steps[kind]().detach().clone() for _ in range(5)]
    if not all(map(torch.equal, losses["hand"], losses["static"])):
        raise AssertionError(f"losses differ: {losses}")
    sent = check_same(steps)
    return _interleaved(steps, time.perf_counter_ns, rounds), sent


def _fused_on_two():
    """Static with data parallelism: gradients one by one, and in few collectives."""
    (times, _), _ = run_ranks(_rank_fused, 2, timeout=300)
    one, few = (statistics.median(times[kind]) for kind in ("static", "fused"))
    return {
        "case": "LLaMA, dp on 2 gloo ranks",
        "static_ms": round(one, 2),
        "static_fused_comm_ms": round(few, 2),
    }


def _rank_fused(rounds=8):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    steps = {"fused": build("llama", "static", mesh, dp="dp")}
    one_by_one = ("dist-rng", "dtensor-rules")
    steps["static"] = build("llama", "static", mesh, use=one_by_one, dp="dp")
    return _interleaved(steps, time.perf_counter_ns, rounds), None


def _fully_sharded_on_fake_mesh(rounds=12):
    with fake_mesh((2, RANKS // 2), ("dp", "tp")) as mesh, _one_core():
        steps = {kind: build_fully_sharded(kind, mesh) for kind in ("hand", "static")}
        times = _interleaved(steps, time.thread_time_ns, rounds)
    return _fully_sharded_row("dp 2 x tp 4 on simulated ranks", times, min)


def _fully_sharded_on_four():
    times, *_ = run_ranks(_rank_fully_sharded, 4, timeout=300)
    return _fully_sharded_row("dp 2 x tp 2 on gloo ranks", times, statistics.median)


def _rank_fully_sharded(rounds=8):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    steps = {kind: build_fully_sharded(kind, mesh) for kind in ("hand", "static")}
    for _ in range(3):
        hand, static = (steps[kind]().detach().clone() for kind in ("hand", "static"))
        dist.all_reduce(hand, group=mesh.get_group("dp"))  # of two halves of the batch
        torch.testing.assert_close(hand / 2, static)
    return _interleaved(steps, time.perf_counter_ns, rounds)


def build_fully_sharded(kind, mesh):
    """As `build`, of LLaMA under fully_shard; by hand it gets its half of the batch."""
    model, batch, layer = _model("llama"), _batch("llama"), r"model\.layers\.\d+"
    if kind == "hand":
        model = by_hand(model, mesh["tp"])
        for one in (*model.model.layers, model):
            fully_shard(one, mesh=mesh["dp"])
        half = mesh.get_local_rank("dp")
        batch = {name: tensor.chunk(2)[half] for name, tensor in batch.items()}
    else:
        plan = zoo.llama(mesh, dp="dp").fully_shard(layer, "dp").fully_shard("", "dp")
        model = parallelize(model, plan, mode="static", guard_steps=0)
    return _step_of("llama", model, batch)


def _fully_sharded_row(ranks, times, typical):
    hand, static = (typical(times[kind]) for kind in ("hand", "static"))
    return {
        "case": f"LLaMA, fully_shard, {ranks}", "hand_ms": round(hand, 2),
        "static_ms": round(static, 2), "static_times_hand": round(static / hand, 3),
        "most_static": MOST, "met": "yes" if static / hand <= MOST else "no",
    }  # fmt: skip


def _interleaved(steps, clock, rounds, turns=12, warmup=3):
    """Milliseconds a step of each kind, every time; kinds take turns.

    All but native DTensor run with dtensor-rules switched on, as `parallelize` leaves them.
    Switching takes so long that in each round the others take several turns, of which native, some
    four times as long, takes two.
    """
    times = {kind: [] for kind in steps}
    native = {kind: step for kind, step in steps.items() if kind == "native"}
    others = {kind: step for kind, step in steps.items() if kind != "native"}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        dtensor_rules.enable()
        _turns(others, clock, turns, warmup, times)
        if native:
            dtensor_rules.disable()
            _turns(native, clock, 2, 1, times)
    dtensor_rules.enable()
    gc.enable()
    return times


def _turns(steps, clock, turns, warmup, times):
    for turn in range(-warmup, turns):
        for kind, step in steps.items():
            if dist.get_backend() == "gloo":
                dist.barrier()
            start = clock()
            step()
            if turn >= 0:
                times[kind].append((clock() - start) / 1e6)


@contextlib.contextmanager
def _one_core():
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)


def _row(case, times, typical):
    best = {f"{kind}_ms": round(typical(times[kind]), 2) for kind in KINDS}
    times_hand = {
        f"{kind}_times_hand": round(typical(times[kind]) / typical(times["hand"]), 3)
        for kind in KINDS[1:]
    }
    met = "yes" if times_hand["static_times_hand"] <= MOST else "no"
    return {"case": case} | best | times_hand | {"most_static": MOST, "met": met}
