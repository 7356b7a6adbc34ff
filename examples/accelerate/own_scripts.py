"""accelerate's own example scripts, unchanged, with its FSDP2 plugin and with fsdp.

Run ``python examples/accelerate/own_scripts.py --accelerate CLONE`` with a clone of
huggingface/accelerate. Each script is started by ``accelerate launch SCRIPT`` and by
``accelerate launch -m fsdp.integrations SCRIPT``, in a folder that has small models and data under
the Hub's names, so that it needs no network. Losses, trained weights and printed metrics are
compared; the command exits with 1 if a script fails, or differs by more than its tolerance.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent.resolve()
SYSTEMS = ("native", "fsdp")
# The launcher's own template for FSDP, and what makes it FSDP2 in single precision. The scripts
# call `model.to`, which accelerate's efficient loading does not support.
LAUNCH = "--fsdp_version 2 --fsdp_cpu_ram_efficient_loading false --mixed_precision no"
BERT = "--fsdp_transformer_layer_cls_to_wrap BertLayer"
LLAMA = "--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer"
NO_LAYERS = "--fsdp_auto_wrap_policy NO_WRAP"
SAVE = "--checkpointing_steps epoch --output_dir saved"
RESUME = "--resume_from_checkpoint saved/epoch_0"
SHORT = "--num-steps 5 --sequence-length 16"
BY_FEATURE, NATIVE = "by_feature", "torch_native_parallelism"


@dataclass(frozen=True)
class Script:
    """How one of accelerate's scripts is run.

    Attributes:
        path: below ``examples`` of accelerate.
        launch: options of `accelerate launch`.
        runs: arguments of the script, once for each run in one folder; a second one resumes.
        ranks: how many it needs; None: any number.
        ends_in: a function of which an error ends the script with native FSDP2, too; empty: none.
        data: folder of the hub, whose data sets replace those of the same names.
        tolerance: largest difference of a loss, and of a trained weight relative to the largest
            change of a weight by training; 0: bit for bit.
    """

    path: str
    launch: str = BERT
    runs: Sequence[str] = ("",)
    ranks: int | None = None
    ends_in: str = ""
    data: str = ""
    tolerance: float = 0.0


@dataclass(frozen=True)
class Record:
    """What the ranks of one run recorded (``on_cpu/sitecustomize.py``), and rank 0 printed.

    Attributes:
        placements: names of the types of placements of all parameters.
        losses: of each rank, those that it passed to `accelerator.backward`.
        start: the trainable parameters before training, one after another.
        end: those after training.
        printed: the numbers of the lines that begin with ``epoch``.
    """

    placements: frozenset[str]
    losses: Sequence[Sequence[float]]
    start: torch.Tensor
    end: torch.Tensor
    printed: Sequence[float]


@dataclass(frozen=True)
class Result:
    """What the comparison of one script came to.

    Attributes:
        script: its path.
        losses: how many were compared.
        difference: the largest of a loss or of a printed number.
        weights: the largest of a trained weight, relative to the largest change by training; None:
            no weights were recorded.
        error: why it differs or did not end; empty: none.
        left_out: why it was not run; empty: it was.
    """

    script: str
    losses: int = 0
    difference: float = 0.0
    weights: float | None = None
    error: str = ""
    left_out: str = ""

    def __str__(self) -> str:
        """One line for the table that the command prints."""
        equal = "equal" if self.difference or self.weights else "bit for bit"
        weights = "not recorded" if self.weights is None else f"{self.weights:.1e}"
        found = f"{equal}: {self.losses} losses, {self.difference:.1e}; weights, {weights}"
        return f"{self.script}: {self.left_out or self.error or found}"


SCRIPTS = (
    Script("nlp_example.py"),
    Script("complete_nlp_example.py", runs=(SAVE, RESUME)),
    Script("cv_example.py", NO_LAYERS, ("--data_dir images",)),
    Script(
        "complete_cv_example.py",
        NO_LAYERS,
        [f"--data_dir images {arguments}" for arguments in (SAVE, RESUME)],
    ),
    Script(f"{BY_FEATURE}/automatic_gradient_accumulation.py"),
    Script(f"{BY_FEATURE}/checkpointing.py", runs=(SAVE, RESUME)),
    # Each fold has a new head, of which a rank shards its own random values. They are those of the
    # other ranks only while all ranks' dropout has drawn equally many numbers.
    Script(f"{BY_FEATURE}/cross_validation.py", data="equal_lengths"),
    Script(f"{BY_FEATURE}/early_stopping.py"),
    Script(f"{BY_FEATURE}/gradient_accumulation.py", runs=("--gradient_accumulation_steps 2",)),
    Script(
        f"{BY_FEATURE}/gradient_accumulation_for_autoregressive_models.py",
        LLAMA,  # with more steps it calls a method that only DDP's modules have
        tolerance=5e-5,  # it clips gradients, and the norm is summed in another order
    ),
    Script(f"{BY_FEATURE}/memory.py"),
    Script(f"{BY_FEATURE}/multi_process_metrics.py"),
    Script(f"{BY_FEATURE}/profiler.py"),
    Script(f"{BY_FEATURE}/schedule_free.py"),
    Script(f"{BY_FEATURE}/tracking.py", runs=("--with_tracking --project_dir logs",)),
    Script(
        f"{NATIVE}/nd_parallel.py",
        LLAMA,
        (f"--dp-shard-size 2 {SHORT} --checkpoint-frequency 2",),
        ranks=2,
        ends_in="save_pretrained",
    ),
)
# Scripts, by the beginnings of their paths, that do not train with FSDP2 where there is no
# accelerator, whoever shards.
LEFT_OUT = {
    "by_feature/ddp_comm_hook.py": "its subject is a hook of DDP",
    "by_feature/deepspeed_with_config_support.py": "DeepSpeed",
    "by_feature/fsdp_with_peak_mem_tracking.py": "reads the memory of an accelerator",
    "by_feature/local_sgd.py": "LocalSGD refuses FSDP",
    "by_feature/megatron_lm_gpt_pretraining.py": "Megatron-LM",
    "alst_ulysses_sequence_parallelism/": "DeepSpeed",
    "config_yaml_templates/": "trains nothing",
    "finetune_lm_tpu.py": "TPUs",
    "inference/": "trains nothing",
    "torch_native_parallelism/fsdp2_fp8.py": "float8 and a compiler; not tried",
    "torch_native_parallelism/nd_parallel_trainer.py": (
        "its Trainer refuses bfloat16 without an accelerator"
    ),
    "multigpu_remote_launcher.py": "starts a script on rented machines",
}


def compare(script: Script, runs: Iterable[Mapping[str, Record]]) -> Result:
    """Compares the runs of a script with native FSDP2 and with fsdp.

    Args:
        script: which.
        runs: one or several, each by the systems' names.
    """
    count, gaps, weights = 0, [0.0], list[float]()
    for run in runs:
        native, own = run["native"], run["fsdp"]
        if "Shard" not in native.placements or "RaggedShard" not in own.placements:
            found = [sorted(one.placements) for one in (native, own)]
            return Result(script.path, error=f"expected Shard and RaggedShard, got {found}")
        shapes = [
            [one.end.numel(), len(one.printed), *map(len, one.losses)] for one in (native, own)
        ]
        if shapes[0] != shapes[1] or not sum(shapes[0][2:]):
            return Result(
                script.path,
                error=f"expected equally many weights, printed numbers and losses of each rank, "
                f"got {shapes}",
            )
        count += sum(shapes[0][2:])
        for one, other in zip(native.losses, own.losses, strict=True):
            gaps += [abs(a - b) for a, b in zip(one, other, strict=True)]
        gaps += [abs(a - b) for a, b in zip(native.printed, own.printed, strict=True)]
        if native.end.numel():
            change = (native.end - native.start).abs().max()
            weights.append(float((own.end - native.end).abs().max() / change))
    # Unlike Python's, torch's maximum is not a number if one of them is not.
    largest = float(torch.tensor(gaps).max())
    weight = float(torch.tensor(weights).max()) if weights else None
    equal = largest <= script.tolerance and (weight is None or weight <= script.tolerance)
    error = "" if equal else f"losses differ by {largest:.1e}, weights by {weight}"
    return Result(script.path, count, largest, weight, error)


def missing_modules(file: Path) -> list[str]:
    """Returns the modules that a script imports at its top level and that are not installed."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module.partition(".")[0])
    beside = {other.stem for other in file.parent.glob("*.py")}
    return sorted(name for name in names - beside if importlib.util.find_spec(name) is None)


def read_record(path: Path, log: str) -> Record:
    """Reads what the ranks of a run wrote.

    Args:
        path: ``RECORD`` of the run.
        log: what the run printed.
    """
    ranks = []
    for file in sorted(path.parent.glob(f"{path.name}-*.jsonl")):
        ranks.append([json.loads(line) for line in file.read_text().splitlines()])
    lines = [line for rank in ranks for line in rank]
    weights = path.with_suffix(".pt")
    models: list[dict[str, Any]] = torch.load(weights) if weights.exists() else []
    start, end = (
        torch.cat(
            [torch.zeros(0), *(one.flatten() for model in models for one in model[when].values())]
        )
        for when in ("start", "end")
    )
    numbers = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|\bnan\b|-?\binf\b")
    printed = [line for line in log.splitlines() if line.startswith("epoch")]
    return Record(
        frozenset(name for line in lines for name in line.get("placements", ())),
        [[line["loss"] for line in rank if "loss" in line] for rank in ranks],
        start,
        end,
        [float(number) for line in printed for number in numbers.findall(line)],
    )


def run(script: Script, system: str, folder: Path, options: argparse.Namespace) -> list[Record]:
    """Runs a script, as often as it says, in a folder of its own.

    Args:
        script: which.
        system: of `SYSTEMS`.
        folder: has the small models and data, below ``hub``.
        options: of the command.

    Raises:
        RuntimeError: a run failed; the message has the end of what it printed.
    """
    examples = options.accelerate.resolve() / "examples"
    own = folder / script.path.replace("/", "-") / system
    own.mkdir(parents=True)
    hub = folder / "hub"
    items = {item.name: item for part in ("", script.data) for item in (hub / part).iterdir()}
    for name, item in items.items():
        (own / name).symlink_to(item)
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", str(examples / "config_yaml_templates" / "fsdp.yaml")]
    launch += ["--num_processes", str(script.ranks or options.ranks), "--main_process_port", "0"]
    launch += [*LAUNCH.split(), *script.launch.split()]
    launch += ["-m", "fsdp.integrations"] if system == "fsdp" else []
    records = []
    for number, arguments in enumerate(script.runs):
        command = [*launch, str(examples / script.path), *arguments.split()]
        record = own / f"record{number}"
        printed = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=own, env=environment(folder, record), **printed)
        if error := unexpected_end(script, done.returncode, done.stdout):
            raise RuntimeError(f"with {system}, arguments {arguments!r}: {error}")
        records.append(read_record(record, done.stdout))
    return records


def unexpected_end(script: Script, returncode: int, log: str) -> str:
    """Returns why a run did not end as the script does with native FSDP2; empty: it did."""
    lines = log.splitlines()
    ranks = [line for line in lines if line.startswith("[rank")]  # and not the launcher's
    if not script.ends_in:
        last = "\n".join((ranks or lines)[-20:])
        return f"it fails:\n{last}" if returncode else ""
    if any(f", in {script.ends_in}" in line for line in ranks):
        return ""
    return f"expected an error in {script.ends_in}, got exit status {returncode}"


def environment(folder: Path, record: Path) -> dict[str, str]:
    """Returns the environment of the scripts' processes: no network, and what they record."""
    paths = [str(HERE / "on_cpu"), os.environ.get("PYTHONPATH", "")]
    return (
        {"OMP_NUM_THREADS": "1"}
        | os.environ
        | {
            "HF_HOME": str(record.parent / "home"),  # of the system: what data sets are mapped to
            "HF_HUB_CACHE": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "RECORD": str(record),
        }
    )


def result(script: Script, folder: Path, options: argparse.Namespace) -> Result:
    """Runs a script with both systems at once, and compares."""
    missing = missing_modules(options.accelerate / "examples" / script.path)
    if missing:
        return Result(script.path, left_out=f"not run: {', '.join(missing)} not installed")
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(run, script, system, folder, options) for system in SYSTEMS]
    try:
        native, own = (one.result() for one in started)
    except RuntimeError as error:
        return Result(script.path, error=str(error))
    pairs = zip(native, own, strict=True)
    return compare(script, [dict(zip(SYSTEMS, pair, strict=True)) for pair in pairs])


def results(folder: Path, options: argparse.Namespace) -> Iterator[Result]:
    """Yields the result of each script of the clone whose path has ``--only``."""
    examples = options.accelerate / "examples"
    known = {script.path: script for script in SCRIPTS}
    for file in sorted(examples.rglob("*.py")):
        path, code = file.relative_to(examples).as_posix(), file.read_text()
        if options.only not in path or "__main__" not in code:
            continue
        reasons = [reason for name, reason in LEFT_OUT.items() if path.startswith(name)]
        if path in known:
            yield result(known[path], folder, options)
        else:
            yield Result(path, left_out=f"not run: {[*reasons, 'not known here'][0]}")


def main() -> None:
    """Compares, and exits with 1 where a script fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerate", type=Path, required=True, help="a clone, with examples/")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", metavar="PART", help="of a script's path")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    if not (options.accelerate / "examples").is_dir():
        parser.error(
            f"--accelerate: expected a clone of huggingface/accelerate, got {options.accelerate} "
            f"without examples/; accelerate's packages on PyPI do not have the scripts"
        )
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(HERE / "local_hub.py"), str(folder / "hub")]
        command += [str(folder / "cache")]
        subprocess.run(command, check=True, env=environment(folder, folder / "hub"))
        for one in results(folder, options):
            print(one, flush=True)
            found.append(one)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if not any(one.losses for one in found) or any(one.error for one in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
