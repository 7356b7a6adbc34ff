"""What `nox -s bench -- plan-api` runs: the cost of a hook, of steps, and of making large models.

The steps' picture goes to bench-results/plan-api-static.svg.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import picture
import static_speed
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from plan_api import Phase, Plan, deferred_init, lower, parallelize, zoo
from testkit import fake_mesh

CALLS, ROUNDS = 2000, 30
LAYERS = 80
PICTURE = Path(__file__).parents[3] / "bench-results" / "plan-api-static.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--only", choices=PARTS, help="one part; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = [options.only] if options.only else list(PARTS)
    rows = [row for part in parts for row in PARTS[part]()]
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


def steps():
    """Training steps, and their picture."""
    rows = static_speed.rows()
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture.bars(rows))
    print(f"written: {PICTURE}")
    return rows


def models():
    """Models made, and hooks passed."""
    with fake_mesh((128, 8), ("dp", "tp"), rank=3) as mesh:
        made = deferred_model(mesh)  # first, for the peak is the process's
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        rows = [hook_overhead(mesh)]
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        rows.append(large_model(mesh))
    return [*rows, made]


class Through(nn.Module):
    """Does nothing, so that what it takes is what hooks take."""

    def forward(self, x):
        return x


def hook_overhead(mesh):
    """Microseconds that a site adds to a call whose tensors lie right already."""
    replicate, shard = Replicate(), Shard(0)
    x = DTensor.from_local(torch.ones(4, 4), mesh, [shard, replicate], run_check=False)
    calls = {"no hook": Through(), "empty hook": Through()}
    calls["empty hook"].register_forward_pre_hook(
        lambda module, args, kwargs: None, with_kwargs=True
    )
    for what, path in (("<in>", "<in>"), ("<out>", "<out>")):
        plan = Plan(mesh).shard(path, replicate, "tp").shard(path, shard, "dp")
        calls[what] = parallelize(Through(), plan)
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, module in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                module(x)
            best[name] = min(best[name], 1e6 * (time.perf_counter() - start) / CALLS)
    return {
        "case": "a site that moves nothing",
        "call_us": round(best["no hook"], 2),
        "empty_hook_over_us": round(best["empty hook"] - best["no hook"], 2),
        "in_over_us": round(best["<in>"] - best["no hook"], 2),
        "out_over_us": round(best["<out>"] - best["no hook"], 2),
        "most_us": 1.5,
    }


def llama_70b():
    """LLaMA-3-70B, with values that no device here could hold."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=LAYERS,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, use_cache=False,
        )
    )  # fmt: skip


def deferred_model(mesh):
    """Seconds and memory to make 70 B random parameters on one of 1,024 ranks, fp32."""
    plan = zoo.llama(mesh, dp="dp", sp=True)
    for phase, placement in ((Phase.INIT, Shard(0)), (Phase.RUN, Replicate())):
        plan.shard(r".*(embed_tokens|proj|lm_head|norm)\.weight", placement, "dp", phase)
    start, before = time.perf_counter(), _peak_gib()
    model = deferred_init(llama_70b)
    deferred_s = time.perf_counter() - start
    parallelize(model, plan)
    shards = sum(param.to_local().nbytes for param in model.parameters())
    return {
        "case": f"deferred_init of {sum(p.numel() for p in model.parameters()):,} parameters",
        "ranks": mesh.size(),
        "deferred_s": round(deferred_s, 1),
        "parallelize_s": round(time.perf_counter() - start - deferred_s, 1),
        "shards_gib": round(shards / 2**30, 2),
        "peak_gib": round(_peak_gib(), 2),
        "peak_before_gib": round(before, 2),
    }


def _peak_gib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def large_model(mesh):
    """Seconds to lower and to install a plan on LLaMA's 80 layers, on meta: nothing allocated."""
    with torch.device("meta"):
        model = llama_70b()
    replicate, layer = Replicate(), r"model\.layers\.\d+"
    plan = (
        Plan(mesh)
        .shard("<in:input_ids>", Shard(0), "dp")
        .shard(layer + r".*\.(q|k|v|gate|up)_proj\.weight", Shard(0), "tp")
        .shard(layer + r".*\.(o|down)_proj\.weight", Shard(1), "tp")
        .shard(r"model\.embed_tokens.<out>", Shard(1), "tp")
        .shard(layer + r"\.(self_attn|mlp).<in>", replicate, "tp")
        .shard(layer + r"\.(self_attn|mlp).<out>", Shard(1), "tp")
        .shard("lm_head.<in>", replicate, "tp")
    )
    start = time.perf_counter()
    lowered = lower(plan, model)
    lower_s = time.perf_counter() - start
    start = time.perf_counter()
    parallelize(model, plan)
    return {
        "case": f"parallelize LLaMA of {LAYERS} layers",
        "lower_s": round(lower_s, 2),
        "parallelize_s": round(time.perf_counter() - start, 2),
        "operations": len(lowered.ops),
        "most_s": 2.0,
    }


# First what measures memory: the peak is the process's.
PARTS = {"models": models, "steps": steps}

if __name__ == "__main__":
    main()
