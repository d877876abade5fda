"""Settings of a runtime and sizes as command-line flags."""

from __future__ import annotations

import argparse
from typing import Any

import echo

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_flags(parser: argparse.ArgumentParser, without: frozenset[str] = frozenset()) -> None:
    """Adds one flag for each setting of a runtime, with its documentation, except those in `without`."""
    group = parser.add_argument_group(
        "settings of the runtime", "A flag that is not given comes from ECHO_<NAME>, else it has its default."
    )
    for field in echo.config_fields():
        if field.name in without:
            continue
        unit = f" [{field.unit}]" if field.unit else ""
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            type=field.type,
            metavar="N" if field.type is not str else "NAME",
            help=f"{field.doc}{unit} (default {field.default})".replace("%", "%%"),
        )


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags, as keyword arguments for `echo.Runtime`."""
    names = {field.name for field in echo.config_fields()}
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def size(text: str) -> int:
    """Bytes of a size such as '141G', '512M' or '1.5T' (powers of 1024; 'B' and 'iB' may follow)."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS and number[-1:].isalpha() else ""
    try:
        count = float(number.removesuffix(unit)) * _UNITS[unit]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no size, expected for example 141G") from error
    if not 1 <= count < 2**62:
        raise argparse.ArgumentTypeError(f"'{text}' is no size of a memory")
    return int(count)


def readable(count: float) -> str:
    """A number of bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
