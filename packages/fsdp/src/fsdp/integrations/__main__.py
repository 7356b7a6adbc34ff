"""Runs the script that the command line names, with its arguments, after `install`."""

import os
import runpy
import sys

from fsdp.integrations import install


def main() -> None:
    """Runs the script as ``__main__``; without one it exits with the usage."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m fsdp.integrations SCRIPT [ARGUMENT ...]")
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
