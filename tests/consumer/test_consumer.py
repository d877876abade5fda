"""The installed package as a C++ SDK: what is in it, and a separate CMake project that uses it."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_wheel_holds_everything() -> None:
    files = [str(f) for f in importlib.metadata.files("echo-kv") or []]
    for pattern in (
        r"echo/_core\..*so",
        r"echo/_core\.pyi",
        r"echo/py\.typed",
        r"echo/lib/libecho\.so",
        r"echo/include/echo/runtime\.hpp",
        r"echo/lib/cmake/echo/echo-config\.cmake",
        r"echo/data/tiny_dsa/config\.json",
        r"echo/data/tiny_dsa/model\.safetensors",
        r"echo/data/tiny_dsa/tokenizer\.json",
        r"echo/data/tiny_dsa/tokenizer_config\.json",
    ):
        assert any(re.fullmatch(pattern, f) for f in files), f"{pattern} is not in the wheel: {files}"


def test_wheel_needs_no_cuda() -> None:
    """A build with the CUDA backend, too, runs where neither toolkit nor driver is installed."""
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    import echo

    library = Path(echo.__file__).parent / "lib" / "libecho.so"
    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert needed and not [name for name in needed if "cuda" in name], needed
    symbols = subprocess.run(["readelf", "--dyn-syms", "-W", library], check=True, capture_output=True, text=True)
    assert not re.search(r"\bcuda\w+$", symbols.stdout, re.MULTILINE), "symbols of cudart are visible"


def test_libraries_go_where_they_are_asked_to(tmp_path: Path) -> None:
    """-DCMAKE_INSTALL_LIBDIR=lib64 means a folder below the prefix, wherever cmake is called."""
    cmake = shutil.which("cmake") or shutil.which("cmake", path=Path(sys.executable).parent)
    if cmake is None:
        pytest.skip("cmake is not installed")
    settings = ["-DECHO_CUDA=OFF", "-DECHO_BUILD_PYTHON=OFF", "-DCMAKE_INSTALL_LIBDIR=lib64"]
    subprocess.run([cmake, "-S", HERE.parents[1], "-B", tmp_path, *settings], check=True, capture_output=True)
    script = (tmp_path / "cmake_install.cmake").read_text()
    assert "${CMAKE_INSTALL_PREFIX}/lib64" in script and str(Path.cwd() / "lib64") not in script


def test_consumer(tmp_path: Path) -> None:
    cmake = shutil.which("cmake") or shutil.which("cmake", path=Path(sys.executable).parent)
    if cmake is None:
        pytest.skip("cmake is not installed")
    import echo

    subprocess.run(
        [
            cmake,
            "-S",
            HERE,
            "-B",
            tmp_path,
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_PREFIX_PATH={echo.cmake_dir()}",
        ],
        check=True,
    )
    subprocess.run([cmake, "--build", tmp_path], check=True)
    done = subprocess.run([tmp_path / "consumer"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same bits" in done.stdout
