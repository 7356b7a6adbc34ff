"""What tests of every package need before they are collected.

In importlib mode pytest names a test module after its path from here, ``testkit.tests.test_mesh``,
and puts the folder ``testkit/`` into ``sys.modules`` as a namespace package, which then hides the
installed ``testkit``; unless that is imported already. The same holds for ``integration``.

Hypothesis fails a test that takes longer than 200 ms, which depends on what else the machine does.

On some processors (AMD's family 26, say) the bits of MKL's matrix products depend on the alignment
of tensors in memory, which the two sides of a comparison bit for bit need not have in common. In
its compatible mode they do not.
"""

import contextlib
import importlib
import os

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

importlib.import_module("testkit")
with contextlib.suppress(ModuleNotFoundError):  # `nox -s compat` has no integration to hide
    importlib.import_module("integration")
with contextlib.suppress(ModuleNotFoundError):  # tools/gpu.sh runs tests that do without
    hypothesis = importlib.import_module("hypothesis")
    hypothesis.settings.register_profile("no deadline", deadline=None)
    hypothesis.settings.load_profile("no deadline")
