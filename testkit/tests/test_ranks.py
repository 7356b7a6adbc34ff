import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from testkit import RankError, fake_mesh, run_ranks, start_python
from testkit.ranks import forkserver, run

pytestmark = pytest.mark.ranks

OFFSET = 100.0


@dataclass(frozen=True)
class Answer:
    rank: int
    value: torch.Tensor


def summed(value, scale=1.0):
    tensor = torch.full((3,), value + dist.get_rank())
    dist.all_reduce(tensor)
    return Answer(dist.get_rank(), tensor * scale + OFFSET)


def failing(**kwargs):
    with pytest.raises(RankError) as caught:
        run_ranks(**kwargs)
    return caught.value


def states(error):
    return [(report.rank, report.state) for report in error.reports]


# --- what works


def test_results_come_by_rank_with_args_globals_and_classes_of_the_test_module():
    answers = run_ranks(summed, 2, 1.0, scale=2.0)
    assert [answer.rank for answer in answers] == [0, 1]
    assert all(type(answer) is Answer for answer in answers)
    for answer in answers:
        assert answer.value.tolist() == [106.0] * 3


def test_closure_lambda_partial_and_callable_object():
    captured = 5

    class Adder:
        def __call__(self, value):
            return value + captured + dist.get_rank()

    assert run_ranks(lambda: captured + dist.get_rank(), 2) == [5, 6]
    assert run_ranks(Adder(), 2, 10) == [15, 16]
    assert run_ranks(functools.partial(summed, 0.0), 1)[0].value.tolist() == [100.0] * 3
    assert run_ranks(dist.get_world_size, 2) == [2, 2]


def test_functions_of_this_module_as_arguments():
    def call(other):
        return other(1.0).value[0].item()

    assert run_ranks(call, 2, summed) == [103.0, 103.0]


def test_pytest_raises_works_on_ranks():
    def check():
        with pytest.raises(ValueError, match="no"):
            raise ValueError("no")

    run_ranks(check, 1)


@pytest.mark.parametrize("world_size", [4, 1, 3, 2])
def test_every_world_size_is_served_by_one_pool(world_size):
    def total():
        tensor = torch.ones(())
        dist.all_reduce(tensor)
        return tensor.item(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    assert run_ranks(total, world_size) == [(world_size, 1, "1")] * world_size


def test_the_pool_is_kept_and_a_call_on_it_is_quick():
    pids = run_ranks(os.getpid, 2)
    start = time.perf_counter()
    assert run_ranks(os.getpid, 2) == pids
    # Measured: 0.02 s. The bound only tells a kept pool from a started one (3 s).
    assert time.perf_counter() - start < 1.0


def test_calls_are_isolated():
    def use(shape):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)] * len(shape))
        groups = len(dist.distributed_c10d._world.pg_names)
        return (tensor + tensor).full_tensor().sum().item(), torch.rand(()).item(), groups

    first, again = run_ranks(use, 2, (2,)), run_ranks(use, 2, (2,))
    assert first == again
    assert first[0] == first[1]  # the same seed on every rank
    assert run_ranks(use, 4, (2, 2))[0][0] == 32
    assert run_ranks(use, 2, (2,)) == first


def test_the_groups_of_a_call_are_gone_before_the_next():
    def threads():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def use(shape):
        gc.disable()  # until it is enabled below: nothing goes by chance
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
        tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Partial()])
        tensor.redistribute(placements=[Shard(0), Shard(1)]).full_tensor()
        return threads()

    before = run_ranks(threads, 2)
    try:
        used = run_ranks(use, 2, (1, 2))
        assert all(more > few for more, few in zip(used[0], before[0], strict=True))
        assert run_ranks(use, 2, (1, 2)) == used
        assert run_ranks(threads, 2) == before
    finally:
        run_ranks(gc.enable, 2)


def test_groups_close_while_their_threads_wait_for_the_interpreter():
    def body():
        group = dist.group.WORLD
        tensor = torch.ones(2)
        if dist.get_rank() == 0:  # takes part after both ranks have left the call

            def late():
                time.sleep(0.5)
                group.allreduce([tensor]).wait()

            threading.Thread(target=late).start()
            return
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=False)
        model.itself = [model]  # it is the collector's, and with it the reducer that has the group
        # With no other reference, the group's thread frees the tensor, for which it takes the GIL.
        group.allreduce([tensor])

    run_ranks(body, 2)
    assert run_ranks(dist.get_rank, 2) == [0, 1]


def test_a_function_may_destroy_its_process_group():
    def destroy():
        dist.barrier()  # the other rank may still connect
        dist.destroy_process_group()

    assert run_ranks(destroy, 2) == [None, None]
    assert run_ranks(dist.get_rank, 2) == [0, 1]


def test_a_slow_rank_is_not_cut_off_by_a_fast_one():
    def staggered():
        tensor = torch.ones(1 << 18)
        dist.all_reduce(tensor)
        if dist.get_rank() == 1:
            time.sleep(0.3)
            dist.send(tensor, 2)
        if dist.get_rank() == 2:
            time.sleep(0.6)
            dist.recv(tensor, 1)
        return tensor[0].item()

    assert run_ranks(staggered, 3) == [3.0] * 3


def test_ranks_obey_the_callers_warning_filters_and_path(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)

    def warn():
        import only_here

        warnings.warn("careful", UserWarning, stacklevel=1)
        return only_here.VALUE

    def raises():
        with pytest.raises(UserWarning, match="careful"):
            warn()

    run_ranks(raises, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert run_ranks(warn, 1) == [7]


def test_module_level_code_from_an_importable_module_goes_by_reference(tmp_path, monkeypatch):
    (tmp_path / "importable_here.py").write_text("class Thing: pass\ndef make(): return Thing()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import importable_here

    (thing,) = run_ranks(importable_here.make, 1)
    assert type(thing) is importable_here.Thing


def test_prints_are_shown_with_their_rank(capfd):
    run_ranks(lambda: print(f"hello from {dist.get_rank()}"), 2)
    assert capfd.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def test_calls_from_several_threads_take_turns():
    found = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(run_ranks(lambda: i, 2))) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [[0, 0], [1, 1], [2, 2]]


# --- what fails


def test_one_rank_raises_while_the_other_waits_for_it():
    def lopsided():
        print("about to go wrong")
        if dist.get_rank() == 1:
            raise KeyError("the reason")
        dist.barrier()

    start = time.monotonic()
    error = failing(fn=lopsided, world_size=2, timeout=60)
    assert time.monotonic() - start < 20
    assert states(error) == [(1, "raised"), (0, "running")]
    message = str(error)
    assert message.startswith("run_ranks on 2: raised on rank 1, rank 0 running\n")
    assert "[rank 1] KeyError: 'the reason'" in message
    assert "[rank 1]   about to go wrong" in message
    assert "in barrier" in message.split("[rank 0]", 1)[1]
    assert "worker.py" not in error.reports[0].detail
    assert run_ranks(dist.get_rank, 2) == [0, 1]


def test_every_failing_rank_is_reported_however_it_ends():
    def fail():
        if dist.get_rank() == 1:
            sys.exit(3)
        assert dist.get_rank() == 7, "not seven"

    error = failing(fn=fail, world_size=2)
    assert sorted(states(error)) == [(0, "raised"), (1, "raised")]
    assert "[rank 0] AssertionError: not seven\n[rank 0] assert 0 == 7" in str(error)
    assert "[rank 1] SystemExit: 3" in str(error)


def test_a_hung_rank_is_killed_and_named_with_its_stack():
    def hang():
        if dist.get_rank() == 1:
            time.sleep(600)

    start = time.monotonic()
    error = failing(fn=hang, world_size=2, timeout=1.0)
    assert time.monotonic() - start < 60  # it would sleep for 600
    assert states(error) == [(1, "hung")]
    assert "rank 1 hung" in str(error)
    assert "after 1 s" in str(error)
    assert "test_ranks.py" in error.reports[0].detail
    assert "in hang" in error.reports[0].detail


def test_ranks_that_die_are_named_with_their_end():
    def die():
        os.write(1, b"last output")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)

    error = failing(fn=die, world_size=2)
    assert sorted(states(error)) == [(0, "died"), (1, "died")]
    assert "[rank 0] exited with code 3 during the call" in str(error)
    assert "[rank 1] was killed by SIGKILL during the call" in str(error)
    assert "[rank 1]   last output" in str(error)


def test_an_unsendable_result_names_the_rank_and_the_remedy():
    def lock():
        return threading.Lock() if dist.get_rank() == 1 else 0

    error = failing(fn=lock, world_size=2)
    assert states(error) == [(1, "raised")]
    assert "the result, a lock, cannot be sent back" in str(error)


def test_a_rank_that_cannot_start_is_named(monkeypatch):
    monkeypatch.setattr(run, "_pool", None)  # the kept ones come back afterwards
    monkeypatch.setattr(forkserver, "_servers", {})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    error = str(failing(fn=dist.get_rank, world_size=1))
    assert "cannot start rank 0: the process that forks ranks ended with exit code 1" in error
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    error = str(failing(fn=dist.get_rank, world_size=1))
    assert "cannot start the process that forks ranks: [Errno 2]" in error


def test_a_rank_that_ends_while_leaving_a_call_is_named_by_the_next():
    def trap():
        dist.destroy_process_group = lambda: os._exit(5)

    run_ranks(trap, 1)
    error = failing(fn=dist.get_rank, world_size=1)
    assert states(error) == [(0, "not ready")]
    assert "exited with code 5 while it started, or left the previous call" in str(error)


def test_modules_that_ranks_can_import_are_sent_by_reference():
    assert run._importable(run)
    assert run._importable(torch.nn)
    assert run._importable(os.path)
    assert not run._importable(sys.modules[__name__])
    assert not run._importable(sys.modules["__main__"])
    assert run_ranks(os.path.join, 1, "a", "b") == ["a/b"]


def test_an_idle_rank_that_was_killed_is_replaced():
    (pid,) = run_ranks(os.getpid, 1)
    run_ranks(dist.get_rank, 1)  # ready again: it has answered since
    pool = run._pool
    while not (pool.usable() and pool.ranks[0].ready):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    while pool.usable():  # until its end is known
        time.sleep(0.01)
    assert run_ranks(dist.get_rank, 1) == [0]


@pytest.mark.parametrize("world_size", [0, -1, 9])
def test_world_size_out_of_range(world_size):
    with pytest.raises(ValueError, match=f"expected world_size= from 1 to 8, got {world_size}"):
        run_ranks(dist.get_rank, world_size)


@pytest.mark.parametrize("world_size", [2.0, "2", True, None])
def test_world_size_of_another_type(world_size):
    with pytest.raises(TypeError, match="expected world_size= from 1 to 8, got"):
        run_ranks(dist.get_rank, world_size)


def test_a_function_that_is_none():
    with pytest.raises(TypeError, match="expected a function, got fn=3"):
        run_ranks(3, 2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_timeout_out_of_range(timeout):
    with pytest.raises(ValueError, match="timeout"):
        run_ranks(dist.get_rank, 2, timeout=timeout)


def test_an_argument_that_cannot_be_sent():
    pids = run_ranks(os.getpid, 1)
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        run_ranks(print, 1, threading.Lock())
    assert run_ranks(os.getpid, 1) == pids  # nothing has run: the pool is kept


def test_a_function_that_names_a_module_of_a_class_of_its_own(monkeypatch):
    """torch.ops, which torch.compile enters into sys.modules, so that cloudpickle sends it too."""
    monkeypatch.setitem(sys.modules, "torch.ops", torch.ops)
    assert run_ranks(lambda: str(torch.ops.aten.add.Tensor), 1) == ["aten.add.Tensor"]


def test_a_placement_class_is_sent_with_its_metaclass():
    class Own(Placement):
        pass

    def check():
        return isinstance(Own(), Placement), type(Own) is type(Placement)

    assert run_ranks(check, 1) == [(True, True)]


def test_a_call_on_a_rank_is_refused():
    def nested():
        with pytest.raises(RuntimeError, match="got one on rank 0 of another run_ranks"):
            run_ranks(dist.get_rank, 1)

    run_ranks(nested, 1)


def test_a_process_group_of_the_parent_does_not_matter():
    with fake_mesh((4,)):
        assert run_ranks(dist.get_rank, 1) == [0]


def test_ranks_begin_with_preloaded_modules_that_were_imported_once(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    script = """
import sys, testkit

def importer():
    import os, sys
    return os.getpid(), getattr(sys.modules.get("first"), "IMPORTED_BY", None)

sys.path.insert(0, sys.argv[1])
testkit.preload("first")
for result in testkit.run_ranks(importer, 2):
    print(*result)
print("first" in testkit.run_python("-c", "import sys; print(*sys.modules)").stdout.split())
other = testkit.run_python("-c", "import sys; print(*sys.modules)", preloaded=False)
print("first" in other.stdout.split(), "torch" in other.stdout.split())
testkit.preload("first")
try:
    testkit.preload("second")
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    *ranks, command, other_command, refused = run.stdout.splitlines()
    (own, importer), (other, same) = (line.split() for line in ranks)
    assert importer == same != "None"
    assert len({own, other, importer}) == 3
    assert (command, other_command) == ("True", "False True")
    assert "got second after it" in refused


def test_ranks_die_with_their_parent(tmp_path):
    script = "import os, testkit\nprint(testkit.run_ranks(os.getpid, 1)[0], flush=True)\n"
    ends = ("pass", "import signal; os.kill(os.getpid(), signal.SIGKILL)")
    parents = [
        start_python(
            "-c",
            script + end,
            environment=os.environ | {"TMPDIR": str(tmp_path)},  # where a killed one leaves files
        )
        for end in ends
    ]
    for parent in parents:
        done = parent.wait(timeout=60)
        assert done.stderr == ""
        deadline = time.monotonic() + 10
        while alive(int(done.stdout)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
