"""Makes pytest take the installed testkit and integration for what they are.

In importlib mode it names a test module after its path from here, ``testkit.tests.test_mesh``, and
puts the folder ``testkit/`` into ``sys.modules`` as a namespace package, which then hides the
installed ``testkit``; unless that is imported already.
"""

import contextlib
import importlib

importlib.import_module("testkit")
with contextlib.suppress(ModuleNotFoundError):  # `nox -s compat` has no integration to hide
    importlib.import_module("integration")
