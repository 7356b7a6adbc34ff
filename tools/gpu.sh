#!/usr/bin/env bash
# Runs the CUDA tests with the Python of this machine: torch >= 2.11, pytest and the build tools
# have to be there, the network does not. Wheels for what is missing go into .whl/.
#
#   tools/gpu.sh [--dry-run] [PYTEST ARGUMENT ...]     PYTHON=... chooses the interpreter
#
# --dry-run needs no device: it installs as usual, and lists the CUDA tests instead of running them.
# Exit status: 2 without a device or a requirement, otherwise pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
how=()
if [ "${1:-}" = --dry-run ]; then
    shift
    how=(--collect-only -q)
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
install=("$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir
    --target "$site" --upgrade)
if compgen -G '.whl/*.whl' >/dev/null; then
    "${install[@]}" .whl/*.whl
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"

"$python" - "${#how[@]}" <<'PYTHON' || exit 2
import importlib.util
import sys

wanted = "torch numpy pytest hypothesis scikit_build_core cmake ninja pybind11 cloudpickle"
missing = [name for name in wanted.split() if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"tools/gpu.sh: {sys.executable} lacks {', '.join(missing)}; put wheels into .whl/")
import torch

if torch.torch_version.TorchVersion(torch.__version__) < "2.11":
    sys.exit(f"tools/gpu.sh: torch {torch.__version__} is too old; 2.11 or newer is needed")
if torch.cuda.is_available():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
elif sys.argv[1] == "0":
    sys.exit(
        f"tools/gpu.sh: torch {torch.__version__} of {sys.executable} sees no CUDA device here; "
        "run it on a machine that has one, or try the installation alone with --dry-run"
    )
PYTHON

"${install[@]}" --no-build-isolation ./packages/* ./testkit ./integration
status=0
"$python" -m pytest -m cuda -p no:cacheprovider "${how[@]}" packages/*/tests testkit/tests "$@" ||
    status=$?
if [ "$status" -eq 5 ]; then
    echo "tools/gpu.sh: no test is marked 'cuda' (or none that these arguments select): ran nothing"
fi
exit "$status"
