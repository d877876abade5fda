"""`echo-kv bench`: what offloading brings where it counts, on this machine.

`decode`: tokens per second at a fixed amount of GPU memory for rows. Many long requests are served by a real runtime,
with as many of them in a batch as each system can hold; the batch is what offloading buys.
"""

from __future__ import annotations

from typing import Any

from echo.bench import command

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Adds `bench` and its parts to the commands."""
    parser = commands.add_parser(
        "bench",
        help="measure what offloading brings on this machine",
        description="Measures what offloading brings on this machine.",
    )
    command.add_decode(parser.add_subparsers(title="parts", dest="part", required=True, metavar="part"))
