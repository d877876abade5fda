"""`echo-kv doctor`: what was built, what this machine offers, which kernels will run, and what is wrong."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import resource
import sys
from pathlib import Path
from typing import Any

import echo
from echo import settings
from echo.settings import readable

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def add_command(commands: Any) -> None:
    """Adds `doctor` to the commands."""
    parser = commands.add_parser(
        "doctor",
        help="say what was built, what this machine offers, and what is wrong",
        description="Says what was built, what this machine offers, what will run and why. Exit status 1 if a GPU is "
        "there but cannot be used, or an ECHO_* variable has no value of its setting.",
    )
    settings.add_device(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the report; status 1 if a GPU is there but cannot be used, or a variable has no value of its setting."""
    wrong = _wrong_variables()
    report = echo.device_report(_number(options, bool(wrong)))
    lines = [("build", echo.build_info()), *_python(), *_host(), *_gpu(report)]
    for name, text in lines:
        print(f"{name:<18} {text}")
    print()
    for advice in (*(f"PROBLEM: {problem}" for problem in wrong), *_advice(report)):
        print(f"- {advice}")
    return 1 if wrong or (report.devices > 0 and report.problem) else 0


def _number(options: argparse.Namespace, ignore_variable: bool) -> int:
    """Of the GPU that is looked at: the first one, if none is named."""
    if options.device is None and ignore_variable:
        return 0
    text = settings.device(options)
    if text in ("auto", "cpu", "cuda"):
        return 0
    number = text.removeprefix("cuda:")
    if not number.isdecimal() or int(number) >= 1 << 31:
        raise echo.InvalidArgument(f"device: {text!r} given, expected auto, cpu, cuda, cuda:N or N")
    return int(number)


def _wrong_variables() -> list[str]:
    """What is wrong with each ECHO_* variable alone; what depends on the sizes of a model is left to `plan`."""
    fields = {f"ECHO_{field.name.upper()}": field.name for field in echo.config_fields()}
    found = {name: os.environ.pop(name) for name in fields if name in os.environ}
    wrong = []
    try:
        for name, text in found.items():
            os.environ[name] = text
            try:
                settings.check({})
                if fields[name] == "device":
                    echo.machine_limits(text)
            except echo.Error as error:
                wrong.append(str(error).replace(f"{fields[name]}: ", f"{name}: ", 1))
            finally:
                del os.environ[name]
    finally:
        os.environ.update(found)
    return wrong


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def _python() -> list[tuple[str, str]]:
    return [("python", ", ".join(f"{name} {_state_of(name)}" for name in ("torch", "transformers")))]


def _state_of(package: str) -> str:
    """Its version, or that it is missing or broken."""
    if importlib.util.find_spec(package) is None:
        return "missing"
    try:
        return str(importlib.import_module(package).__version__)
    except Exception as error:  # whatever it stumbles over is what a doctor is asked for
        lines = str(error).splitlines() or [""]
        return f"cannot be imported ({type(error).__name__}: {lines[0]})"


def _host() -> list[tuple[str, str]]:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    pages = _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "unknown"
    return [
        ("host memory", f"{readable(echo.machine_limits('cpu').host_bytes)} can be taken, {nodes} NUMA node(s), "
                        f"{os.cpu_count()} cores"),
        ("locked memory", "unlimited" if locked == resource.RLIM_INFINITY else f"{readable(locked)} (ulimit -l)"),
        ("huge pages", f"transparent: {pages}"),
    ]  # fmt: skip


def _gpu(report: echo.DeviceReport) -> list[tuple[str, str]]:
    if not report.name:
        return [("gpu", "none")]
    lines = [
        ("gpu", f"{report.name}, compute capability {report.compute_capability / 10:.1f}, {report.multiprocessors} "
                f"multiprocessors, {readable(report.free_bytes)} of {readable(report.memory_bytes)} free"),
        ("cuda", f"driver supports {_version(report.driver_version)}, built with {_version(report.runtime_version)}"),
    ]  # fmt: skip
    if report.to_device_gb_per_second:
        lines += [
            ("link", f"{report.to_device_gb_per_second:.1f} GB/s to the GPU, "
                     f"{report.to_host_gb_per_second:.1f} GB/s back (one large copy)"),
            ("pinning", f"{report.pin_gib_per_second:.1f} GiB/s; {readable(report.pinned_limit_bytes)} can be pinned"),
        ]  # fmt: skip
    return lines


_NO_SETTINGS = {  # of the build, of bench/, tests/ and tools/
    "ECHO_CUDA", "ECHO_CUDA_ARCHITECTURES", "ECHO_WERROR",
    "ECHO_BUILT", "ECHO_CPP_TESTS", "ECHO_SANITIZE_SECONDS", "ECHO_SITE", "ECHO_WORKERS",
    "ECHO_BENCH_ATTENTION_SPLITS", "ECHO_BENCH_LIBRARY", "ECHO_BENCH_PREFETCH_CAP",
    "ECHO_COMMAND", "ECHO_COMMIT", "ECHO_RESULTS",
    "ECHO_OPERATIONS", "ECHO_SCENARIOS", "ECHO_WHOLE_STEPS",
}  # fmt: skip


def _near(variable: str) -> str:
    known = [f"ECHO_{field.name.upper()}" for field in echo.config_fields()]
    near = difflib.get_close_matches(variable, known, 1, cutoff=0.8)  # they have the beginning in common
    return f"; did you mean {near[0]}?" if near else ""


def _advice(report: echo.DeviceReport) -> list[str]:
    known = _NO_SETTINGS | {f"ECHO_{field.name.upper()}" for field in echo.config_fields()}
    found = [f"{name} is set, but there is no such setting{_near(name)}" for name in sorted(os.environ)
             if name.startswith("ECHO_") and name not in known]  # fmt: skip
    if report.devices and report.problem:
        found.append(f"PROBLEM: the GPU cannot be used: {report.problem}")
    elif report.devices:
        found.append("runs on the GPU: kernels made for Hopper where it is one, generic CUDA kernels elsewhere")
    else:
        found.append(f"runs on the CPU: {report.problem}")
    if _HUGE_PAGES.exists() and "[never]" in _HUGE_PAGES.read_text():
        found.append(f"huge pages are off: the host pool is pinned and read more slowly; set {_HUGE_PAGES} to madvise")
    if report.devices and 0 < report.to_device_gb_per_second < 20:
        found.append("the link is slower than PCIe 4.0 x16: recalls will take long; look at the slot and its lanes")
    torch = sys.modules.get("torch")  # unless it is missing or broken
    if report.devices and torch is not None and not torch.cuda.is_available():
        found.append("torch is a build without CUDA: capture needs one that sees the GPU")
    return found
