"""Which calls are removed, and what takes their place."""

import ast

from tools.check_waits import EQUIVALENT, ordering_calls, page
from tools.workspace import packages

SOURCE = '''"""Umlauts, so that bytes are not characters: ä."""

class Memory:
    def release(self):
        self.stream.wait_event(self.current().record_event())
        self.work.wait()
        return self.pending.wait()  # whose result is used

    def later(self):
        return lambda: self.stream.wait_stream(self.other)
'''.encode()


def test_each_wait_and_record_is_found_with_its_function():
    found = [(one.function, one.source) for one in ordering_calls(SOURCE, "memory.py")]
    assert found == [
        ("Memory.release", "self.current().record_event()"),
        ("Memory.release", "self.stream.wait_event(self.current().record_event())"),
        ("Memory.release", "self.work.wait()"),
        ("Memory.later", "self.stream.wait_stream(self.other)"),
    ]


def test_without_a_call_the_rest_of_the_file_is_as_before():
    event, wait, work, later = ordering_calls(SOURCE, "memory.py")
    assert b"self.stream.wait_event(torch.get_device_module(" in event.removed(SOURCE)
    assert b"    def release(self):\n        None\n        self.work" in wait.removed(SOURCE)
    assert b"\n        None\n        return self.pending.wait()" in work.removed(SOURCE)
    assert b"return lambda: None\n" in later.removed(SOURCE)
    for call in (event, wait, work, later):
        ast.parse(call.removed(SOURCE))


def test_every_call_that_is_said_to_be_equivalent_exists():
    calls = {
        call.key
        for project in packages()
        for file in project.source.rglob("*.py")
        for call in ordering_calls(
            file.read_bytes(), str(file.relative_to(project.folder.parent))
        )
    }  # fmt: skip
    assert EQUIVALENT.keys() <= calls


def test_the_page_says_which_test_fails_and_where_none_does():
    event, wait, *_ = ordering_calls(SOURCE, "dbuffer/src/dbuffer/memory.py")
    rows = page([(event, "test_events"), (wait, None)]).splitlines()[-2:]
    assert rows[0].endswith("| `self.current().record_event()` | `test_events` fails |")
    assert rows[0].startswith("| `dbuffer/memory.py`: `Memory.release` |")
    assert rows[1].endswith("| **no test fails** |")
