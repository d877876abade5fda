"""What the compiler made of kernels that live off certain instructions: read off the library's machine code."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import echo

LIBRARY = Path(echo.__file__).parent / "lib" / "libecho.so"
REGISTERS = 64 * 1024  # of a multiprocessor


@functools.cache
def tools() -> str | None:
    """The folder of cuobjdump and nvdisasm: of the CUDA toolkit, or of the packages nvidia-cuda-*; None without."""
    places = os.environ.get("PATH", "").split(os.pathsep)
    nvidia = importlib.util.find_spec("nvidia")
    for place in nvidia.submodule_search_locations or () if nvidia else ():
        places += [str(folder) for folder in sorted(Path(place).glob("*/bin"))]
    wanted = ("cuobjdump", "nvdisasm")
    return next((place for place in places if all(shutil.which(tool, path=place) for tool in wanted)), None)


@functools.cache
def dump(option: str) -> dict[str, str]:
    """What cuobjdump says of each kernel of the library, by mangled name; skips the test where it cannot."""
    if "90a" not in echo.build_info():
        pytest.skip(f"no code for sm_90a in this build: {echo.build_info()}")
    folder = tools()
    if folder is None:
        pytest.skip("no cuobjdump and nvdisasm (CUDA toolkit, or nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm)")
    done = subprocess.run(
        [str(Path(folder) / "cuobjdump"), option, str(LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": folder + os.pathsep + os.environ.get("PATH", "")},
    )
    pieces = re.split(r"Function\s*:?\s*(\w+):?", done.stdout)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def kernels(option: str, name: str) -> dict[str, str]:
    """What cuobjdump says of the kernels of a template."""
    found = {function: text for function, text in dump(option).items() if name in function}
    assert found, f"no kernel is called {name}"
    return found


@pytest.mark.parametrize("name", ["score_sm90", "score_plain"])
def test_scores_come_from_tensor_cores(name: str) -> None:
    """FP8 products by warpgroups, keys by the copy engine. score_plain has a product for each of its rows."""
    for function, code in kernels("-sass", f"{name}ILi").items():
        ((heads, wide),) = re.findall(name + r"ILi(\d+)ELi(\d+)E", function)
        columns, rows = (heads, int(wide)) if name == "score_plain" else (wide, 1)
        products = re.findall(r"QGMMA\.(\S+)", code)
        assert products == [f"64x{columns}x32.F32.E4M3.E4M3"] * (4 * rows), function
        assert "UTMALDG.3D" in code, function


def test_attention_runs_on_tensor_cores() -> None:
    """Logits of 36 steps, and outputs of 4 steps in two halves of the columns, of both warpgroups."""
    for function, code in kernels("-sass", "attend_sm90").items():
        assert len(re.findall(r"\bHGMMA\.", code)) >= 52, function


@pytest.mark.parametrize(
    ("name", "threads"),
    [("score_sm90ILi", 512), ("score_plainILi", 512), ("attend_sm90", 512), ("select_cluster", 1024)],
)
def test_nothing_spills(name: str, threads: int) -> None:
    """Nothing in local memory, and registers for all threads of a block."""
    for function, code in kernels("-sass", name).items():
        spills = re.findall(r"^.*\b(?:STL|LDL)\b.*$", code, flags=re.MULTILINE)
        assert not spills, f"{function}: {spills[0].strip()} and {len(spills) - 1} more"
    for function, usage in kernels("-res-usage", name).items():
        numbers = {what: int(value) for what, value in re.findall(r"(\w+):(\d+)", usage)}
        assert numbers["REG"] * threads <= REGISTERS, (function, numbers)
        assert numbers["STACK"] == numbers["LOCAL"] == 0, (function, numbers)
