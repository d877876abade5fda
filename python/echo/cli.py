"""The command `echo-kv`."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

# Before torch is loaded: where other programs keep the cores busy, threads that spin while they wait for each other
# make small steps a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import echo
from echo import bench, demo, doctor, plan, policies, predictor, profile, record, replay


class _Parser(argparse.ArgumentParser):
    """Takes whole flags only, and shows the usage of the command that was given one it does not know."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but nothing unknown is left to the parser above."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `echo-kv` with the given arguments (default: the process's); returns the exit status."""
    parser = _Parser(prog="echo-kv", description="KV offloading for models with DeepSeek sparse attention.")
    parser.add_argument("-V", "--version", action="version", version=echo.build_info())
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="command")
    demo.add_command(commands)
    plan.add_command(commands)
    doctor.add_command(commands)
    profile.add_command(commands)
    record.add_command(commands)
    replay.add_command(commands)
    policies.add_command(commands)
    predictor.add_command(commands)
    bench.add_command(commands)
    where = commands.add_parser(
        "cmake-dir",
        help="print the folder for CMAKE_PREFIX_PATH",
        description="Prints the folder with which CMake's find_package(echo) finds this installation.",
    )
    where.set_defaults(run=_print_cmake_dir)
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(given)
    if isinstance(sys.stdout, io.TextIOWrapper):  # no bar or name that a terminal cannot show is worth losing a run
        sys.stdout.reconfigure(errors="backslashreplace")
    failed = 1
    try:
        status = int(options.run(options))
        if sys.stdout is not None:  # it is where the caller has closed it
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (echo.Error, OSError) as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _lacks_memory(error):
            raise
        message = f"there is not enough memory: {error}"
    except KeyboardInterrupt:
        message = "interrupted"
        failed = 128 + signal.SIGINT
    part = getattr(options, "part", None)
    print(f"echo-kv {options.command}{f' {part}' if part else ''}: {message}", file=sys.stderr)
    return failed


def _lacks_memory(error: RuntimeError) -> bool:
    """Whether this is how torch says so: on the CPU it has no class of its own for it."""
    torch = sys.modules.get("torch")
    return torch is not None and (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error))


def _print_cmake_dir(options: argparse.Namespace) -> int:
    print(echo.cmake_dir())
    return 0


if __name__ == "__main__":
    sys.exit(main())
