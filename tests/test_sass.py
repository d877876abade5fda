"""The machine code of kernels whose speed hangs on what the compiler made of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import echo

# Of a kernel's machine code, by a part of its name: at least so many tensor core instructions.
TENSOR_CORE_KERNELS = {"attend_cluster": 52}


def functions(library: Path) -> dict[str, str]:
    """Machine code of each kernel in a library."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("no cuobjdump")
    code = subprocess.run([tool, "--dump-sass", str(library)], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\s*Function : (\S+)$", code, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("kernel", "products"), TENSOR_CORE_KERNELS.items())
def test_products_run_on_tensor_cores_and_nothing_spills(kernel: str, products: int) -> None:
    if "90a" not in echo.build_info():
        pytest.skip("a build without code for sm_90a")
    found = {
        name: code
        for name, code in functions(Path(echo.__file__).parent / "lib" / "libecho.so").items()
        if kernel in name
    }
    assert found, f"no kernel is named {kernel}"
    for name, code in found.items():
        assert len(re.findall(r"\bHGMMA\.", code)) >= products, name
        spills = re.findall(r"^.*\b(?:STL|LDL)\b.*$", code, flags=re.MULTILINE)
        assert not spills, f"{name}: {spills[0].strip()} and {len(spills) - 1} more"
