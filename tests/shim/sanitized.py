"""Run every kernel once under the sanitizers that this process was started with; an error of theirs ends it.

LD_PRELOAD=libasan.so python tests/shim/sanitized.py FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from cuda_shim import ShimLauncher  # noqa: E402

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def main() -> None:
    """Run the operations of the GPU script at a small size."""
    spec = importlib.util.spec_from_file_location("gpu", HERE.parent / "bench" / "gpu.py")
    assert spec is not None and spec.loader is not None
    gpu = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = gpu
    spec.loader.exec_module(gpu)
    bench = gpu.Bench(ShimLauncher(Path(sys.argv[1]), seed=5, flags=FLAGS), 0)
    gpu.run(bench, 256, 12, 4)
    print("all equal" if all(row.right for row in bench.rows) else "wrong")


if __name__ == "__main__":
    main()
