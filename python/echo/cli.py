"""The command `echo-kv`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import echo
from echo import bench, demo, doctor, plan, policies, predictor, profile, record, replay


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `echo-kv` with the given arguments (default: the process's); returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="echo-kv", description="KV offloading for models with DeepSeek sparse attention."
    )
    parser.add_argument("--version", action="version", version=echo.build_info())
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo.add_command(commands)
    plan.add_command(commands)
    doctor.add_command(commands)
    profile.add_command(commands)
    record.add_command(commands)
    replay.add_command(commands)
    policies.add_command(commands)
    predictor.add_command(commands)
    bench.add_command(commands)
    where = commands.add_parser("cmake-dir", help="print the folder for CMAKE_PREFIX_PATH")
    where.set_defaults(run=_print_cmake_dir)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except echo.Error as error:
        print(f"echo-kv {options.command}: {error}", file=sys.stderr)
        return 1


def _print_cmake_dir(options: argparse.Namespace) -> int:
    print(echo.cmake_dir())
    return 0


if __name__ == "__main__":
    sys.exit(main())
