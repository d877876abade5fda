"""Settings of a runtime and sizes as command-line flags."""

from __future__ import annotations

import argparse
from numbers import Integral
from typing import Any

import echo

_DEVICES = next(field.choices for field in echo.config_fields() if field.name == "device")
_OF_SIZES = frozenset({"gpu_slots", "host_row_stride"})  # their limits follow from the model
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_LEAST_BYTES = 1 << 20  # that are taken without a unit


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
            type=word if field.type is str else field.type,
            metavar="N" if field.type is not str else "NAME",
            help=f"{field.doc}{unit} (default {_text(field.default)})".replace("%", "%%"),
        )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`, for commands that take no other settings of a runtime, or only some."""
    parser.add_argument("--device", type=word, metavar="NAME", help=f"{_DEVICES} (default: ECHO_DEVICE, else auto)")


def add_row_format(parser: argparse.ArgumentParser) -> None:
    """Adds `--row-format`, with the formats that attention reads."""
    parser.add_argument(
        "--row-format",
        choices=("fp8_656", "bf16_1152", "fp32"),
        default="fp8_656",
        help="how rows of KV are stored (default fp8_656)",
    )


def device(options: argparse.Namespace) -> str:
    """The device that was asked for, by the flag or by ECHO_DEVICE.

    Raises:
        InvalidArgument: naming an ECHO_* variable that is no setting.
    """
    asked: str = echo.RuntimeConfig().device if options.device is None else options.device
    return asked


def check(settings: dict[str, Any]) -> None:
    """Finds out before anything is done what no runtime would take, whatever its sizes; variables count as well.

    Raises:
        InvalidArgument: naming the setting or the variable.
    """
    free = {name: value for name, value in settings.items() if name not in _OF_SIZES}
    fixed = {"gpu_slots": 0, "host_row_stride": 0}
    echo.make_plan(echo.ModelShape.tiny(), echo.RuntimeConfig(**free, **fixed), echo.MachineLimits())


def check_seed(seed: object) -> None:
    """InvalidArgument naming `seed` if it is one that generators of numpy or torch do not take."""
    if not isinstance(seed, Integral) or not 0 <= int(seed) < 1 << 63:
        raise echo.InvalidArgument(f"seed: {seed!r} given, expected an integer from 0 to {(1 << 63) - 1}")


def _text(default: str | int | float) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def given(options: argparse.Namespace, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The settings that were given as flags, except those in `without`, as keyword arguments for `echo.Runtime`."""
    names = {field.name for field in echo.config_fields()} - without
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def word(text: str) -> str:
    """The value of a flag; bytes that are no text, which would go no further, are refused."""
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no text")
    return text


def size(text: str) -> int:
    """Bytes of a size such as '141G', '512M' or '1.5T' (powers of 1024; 'B' and 'iB' may follow).

    Few bytes without a unit are refused: whoever writes 20 means 20G.
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS and number[-1:].isalpha() else ""
    try:
        count = float(number.removesuffix(unit)) * _UNITS[unit]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no size, expected for example 141G") from error
    if not 1 <= count < 2**62:
        raise argparse.ArgumentTypeError(f"'{text}' is no size of a memory")
    if text.strip().isdecimal() and count < _LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"'{text}' are bytes, expected a unit, for example {text.strip()}G")
    return int(count)


def counted(number: int, what: str) -> str:
    """For people: "1 layer", "2,000 layers"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def readable(count: float) -> str:
    """A number of bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
