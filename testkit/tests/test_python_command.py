"""Commands that begin with torch imported are otherwise what a new interpreter's would be."""

import os
import signal
import subprocess
import time

import pytest

from testkit import run_python, start_python

pytestmark = pytest.mark.ranks


def printed(code, *arguments, **options):
    """What a piece of code prints, which must succeed."""
    result = run_python("-c", code, *arguments, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_a_command_has_an_exit_code_and_output_of_its_own():
    code = "import sys; print(sys.argv); print('why', file=sys.stderr); sys.exit(3)"
    result = run_python("-c", code, "--steps", "2")
    assert (result.returncode, result.stdout, result.stderr) == (
        3,
        "['-c', '--steps', '2']\n",
        "why\n",
    )


def test_an_exception_ends_a_command_with_its_traceback():
    result = run_python("-c", "def f():\n    raise KeyError('none')\nf()")
    assert result.returncode == 1
    assert 'File "<string>", line 2, in f' in result.stderr
    assert result.stderr.endswith("KeyError: 'none'\n")


def test_it_is_a_process_that_begins_with_torch():
    code = "import os, sys; print(os.getpid(), os.getsid(0), 'torch' in sys.modules)"
    pid, session, has_torch = printed(code)
    assert pid == session != str(os.getpid())
    assert has_torch == "True"


def test_modules_and_files_run_as_the_main_program(tmp_path, monkeypatch):
    for name in ("program", "package/__main__"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("import sys\nimport beside\nprint(__name__, *sys.argv)\n")
    (tmp_path / "beside.py").touch()
    monkeypatch.chdir(tmp_path)
    for first, file in {
        ("-m", "program"): "program.py",
        ("-m", "package"): "package/__main__.py",
        (str(tmp_path / "program.py"),): "program.py",
    }.items():
        result = run_python(*first, "--help")
        assert result.stdout == f"__main__ {tmp_path / file} --help\n", result.stderr


def test_environment_and_folder_are_the_callers_of_the_moment(monkeypatch, tmp_path):
    code = "import os; print(os.environ.get('GREETING'), os.getcwd(), len(os.environ))"
    monkeypatch.setenv("GREETING", "hello")
    monkeypatch.chdir(tmp_path)
    assert printed(code) == ["hello", str(tmp_path), str(len(os.environ))]
    monkeypatch.delenv("GREETING")
    assert printed(code) == ["None", str(tmp_path), str(len(os.environ))]
    assert printed(code, environment={"GREETING": "bye"}) == ["bye", str(tmp_path), "1"]


def test_nothing_that_a_command_changes_is_there_in_the_next():
    state = (
        "import os, signal, warnings, torch\n"
        "print(torch.get_num_threads(), len(warnings.filters), os.environ.get('LEFT'),"
        " hasattr(torch, 'left'), signal.getsignal(signal.SIGTERM).name)\n"
    )
    change = (
        "torch.set_num_threads(3); warnings.simplefilter('error')\n"
        "os.environ['LEFT'] = '1'; torch.left = 1; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    )
    before = printed(state)
    assert before == printed(state + change) == printed(state)
    assert before[0] == "1"


def test_random_numbers_without_a_seed_differ_between_commands():
    code = (
        "import random, numpy, torch\n"
        "print(random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item())"
    )
    first, second = printed(code), printed(code)
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_a_signal_ends_a_command():
    process = start_python("-c", "import time; print('started', flush=True); time.sleep(60)")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20).returncode == process.poll() == -signal.SIGTERM


def test_a_command_that_takes_too_long_is_killed_and_its_output_shown():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_python("-c", code, timeout=1.0)
    pid = int(caught.value.output)
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("arguments", [(), ("-m",), ("-W", "error", "program.py")], ids=str)
def test_options_of_the_interpreter_are_refused(arguments):
    with pytest.raises(ValueError, match=r"expected -m MODULE, -c CODE or a file, got \("):
        start_python(*arguments)
