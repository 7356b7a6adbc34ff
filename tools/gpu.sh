#!/usr/bin/env bash
# Checks and measures everything on the GPUs of this machine, with the Python of this machine:
# torch >= 2.11 and the build tools have to be there, the network does not. Wheels for what is
# missing go into .whl/. Ends within 9 minutes; writes gpu-results/gpu.json and gpu.md.
#
#   tools/gpu.sh [--dry-run] [--out DIR] [--parts tests training ...]     PYTHON=... chooses the
#   interpreter
#
# --dry-run needs no GPU: it installs as usual, and runs the same parts on a simulated device.
# Exit status: 2 without a device or a requirement, 1 if a part fails (the others run), otherwise 0.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
device=cuda
if [ "${1:-}" = --dry-run ]; then
    shift
    device=sim
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
install=("$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir
    --target "$site" --upgrade)
if compgen -G '.whl/*.whl' >/dev/null; then
    "${install[@]}" .whl/*.whl
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"

"$python" - "$device" <<'PYTHON' || exit 2
import importlib.util
import sys

wanted = (
    "torch numpy pytest hypothesis scikit_build_core cmake ninja pybind11 cloudpickle transformers "
    "pydantic tyro rich psutil"
)
missing = [name for name in wanted.split() if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"tools/gpu.sh: {sys.executable} lacks {', '.join(missing)}; put wheels into .whl/")
import torch

if torch.torch_version.TorchVersion(torch.__version__) < "2.11":
    sys.exit(f"tools/gpu.sh: torch {torch.__version__} is too old; 2.11 or newer is needed")
if torch.cuda.is_available():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
elif sys.argv[1] == "cuda":
    sys.exit(
        f"tools/gpu.sh: torch {torch.__version__} of {sys.executable} sees no CUDA device here; "
        "run it on a machine that has one, or try it on a simulated device with --dry-run"
    )
PYTHON

# All at once: most have one file to compile, and a machine with a GPU has the cores.
builds=()
for project in packages/* testkit integration; do
    "$python" -m pip wheel --quiet --no-index --no-deps --no-build-isolation --no-cache-dir \
        --wheel-dir "$site/wheels" "./$project" &
    builds+=($!)
done
for build in "${builds[@]}"; do
    wait "$build"
done
"${install[@]}" "$site"/wheels/*.whl
"$python" -m tools.gpu_checks --device "$device" --seconds $((530 - SECONDS)) "$@"
