"""Results of benchmarks as JSON files, with the machine, the commit and the command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("ECHO_RESULTS", Path(__file__).parent / "results"))


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, str]:
    """GPU, driver, CUDA version and CPU of this machine."""
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    name, driver = (part.strip() for part in gpu[0].split(",")) if gpu else ("none", "none")
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    nvcc = _output("nvcc", "--version").splitlines()
    cuda = nvcc[-2].split("release ")[1].split(",")[0] if len(nvcc) > 1 else "none"
    return {"gpu": name, "driver": driver, "cuda": cuda, "cpu": f"{cpu}, {os.cpu_count()} cores"}


def write(name: str, cases: list[dict[str, Any]]) -> Path:
    """Writes `bench/results/NAME.json` (or into the folder ECHO_RESULTS).

    Args:
        name: of the benchmark.
        cases: one entry a case: `case` (its keys), `us` (median) or other figures, `ceiling_us`, `peers`.
    """
    result = {
        "machine": machine(),
        "commit": os.environ.get("ECHO_COMMIT") or _output("git", "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": os.environ.get("ECHO_COMMAND") or " ".join([Path(sys.executable).name, *sys.argv]),
        "cases": cases,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    part = path.with_suffix(".part")  # whoever is ended here leaves a baseline whole
    part.write_text(json.dumps(result, indent=2) + "\n")
    part.replace(path)
    return path


if __name__ == "__main__":  # record.py NAME FILE: figures that another program left in a JSON file
    figures = json.loads(Path(sys.argv[2]).read_text())
    print(write(sys.argv[1], figures if isinstance(figures, list) else [figures]))
