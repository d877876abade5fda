"""What the compiler made of kernels that live off certain instructions: read off the library's machine code."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import echo

LIBRARY = Path(echo.__file__).parent / "lib" / "libecho.so"
MOST_REGISTERS = 128  # of 512 threads


def cuobjdump(option: str) -> dict[str, str]:
    """What cuobjdump says of each kernel of the library, by mangled name; skips the test where it cannot."""
    if "90a" not in echo.build_info():
        pytest.skip(f"no code for sm_90a in this build: {echo.build_info()}")
    if shutil.which("cuobjdump") is None:
        pytest.skip("no cuobjdump on the PATH (CUDA toolkit, or nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm)")
    done = subprocess.run(["cuobjdump", option, str(LIBRARY)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cuobjdump {option}: {done.stderr.strip()}")
    pieces = re.split(r"Function\s*:?\s*(\w+):?", done.stdout)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def kernels(text: dict[str, str], name: str) -> dict[str, str]:
    """Those of a kernel template."""
    found = {function: code for function, code in text.items() if name in function}
    assert found, f"no kernel is called {name}"
    return found


def test_scores_come_from_tensor_cores():
    """FP8 products by warpgroups, keys by the copy engine, nothing kept in local memory."""
    for function, code in kernels(cuobjdump("-sass"), "score_sm90").items():
        (columns,) = re.findall(r"score_sm90ILi\d+ELi(\d+)E", function)
        products = re.findall(r"QGMMA\.(\S+)", code)
        assert products == [f"64x{columns}x32.F32.E4M3.E4M3"] * 4, function
        assert "UTMALDG.3D" in code, function
        assert not re.findall(r"\b(?:LDL|STL)\b", code), f"{function} spills"


def test_scores_fit_into_registers():
    """A thread block of 512 threads."""
    for function, usage in kernels(cuobjdump("-res-usage"), "score_sm90").items():
        numbers = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
        assert numbers["REG"] <= MOST_REGISTERS and numbers["STACK"] == numbers["LOCAL"] == 0, (function, numbers)
