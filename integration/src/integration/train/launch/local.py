"""Starts the ranks of ``--ranks`` on this machine, with torchrun's agent."""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from integration.errors import UsageError
from integration.train.folders import make_folder

# Folder in which ranks report their status to the launcher: `N.started`, `N.refused`.
STATUS_VARIABLE = "SPMD_TRAIN_STATUS"


def report_status(kind: str, text: str = "") -> bool:
    """Reports to the launcher, if any, that this rank has ``started`` or was ``refused``."""
    folder = os.environ.get(STATUS_VARIABLE)
    if folder is None:
        return False
    (Path(folder) / f"{os.environ['LOCAL_RANK']}.{kind}").write_text(text)
    return True


def launch(
    arguments: Sequence[str],
    ranks: int,
    *,
    log_folder: Path,
    module: str = "integration.train",
    python: str = sys.executable,
) -> int:
    """Runs ``python -m module`` with ``arguments`` on ``ranks`` local ranks.

    The first rank writes to this terminal, the others to files in ``log_folder``.

    Returns:
        The exit code: 0, or that of the rank that failed first.

    Raises:
        UsageError: a rank refused its options, or could not be started.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    make_folder(log_folder)
    with tempfile.TemporaryDirectory(prefix="spmd-train-") as status:
        os.environ[STATUS_VARIABLE] = status
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(
                log_dir=str(log_folder), redirects=dict.fromkeys(range(1, ranks), Std.ALL)
            ),
        )
        try:
            elastic_launch(config, python)("-m", module, *arguments)
        except ChildFailedError as error:
            return _explain(error, Path(status), ranks, log_folder)
        except SignalException as error:
            return 128 + int(error.sigval)
        except (OSError, RuntimeError) as error:
            raise UsageError(f"the {ranks} ranks could not be started: {error}") from error
        finally:
            del os.environ[STATUS_VARIABLE]
    return 0


def _explain(error: ChildFailedError, status: Path, ranks: int, log_folder: Path) -> int:
    for refusal in sorted(status.glob("*.refused")):
        raise UsageError(refusal.read_text())
    rank, failure = error.get_first_failure()
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = signal.Signals(-failure.exitcode).name
    if not (status / f"{rank}.started").exists():
        raise UsageError(
            f"rank {rank} of {ranks} could not be started ({how}); see its output in {log_folder}"
        )
    if failure.exitcode != 128 + signal.SIGTERM:
        print(
            f"rank {rank} of {ranks} failed ({how}); see its output above or in {log_folder}",
            file=sys.stderr,
        )
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
