"""What tests of every package need before they are collected.

In importlib mode pytest names a test module after its path from here, ``testkit.tests.test_mesh``,
and puts the folder ``testkit/`` into ``sys.modules`` as a namespace package, which then hides the
installed ``testkit``; unless that is imported already. The same holds for ``integration``.

Hypothesis fails a test that takes longer than 200 ms, which depends on what else the machine does.
"""

import contextlib
import importlib

importlib.import_module("testkit")
with contextlib.suppress(ModuleNotFoundError):  # `nox -s compat` has no integration to hide
    importlib.import_module("integration")
with contextlib.suppress(ModuleNotFoundError):  # tools/gpu.sh runs tests that do without
    hypothesis = importlib.import_module("hypothesis")
    hypothesis.settings.register_profile("no deadline", deadline=None)
    hypothesis.settings.load_profile("no deadline")
