"""`echo-kv bench decode`, recorded: decode.json, and the picture decode.png beside it. Flags go to the command.

What is finished when it is stopped before is in decode-part.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import record

from echo import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and records."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    record.RESULTS.mkdir(parents=True, exist_ok=True)
    part = record.RESULTS / "decode-part.json"
    status = cli.main(["bench", "decode", *given, "--json", str(part), "--plot", str(record.RESULTS / "decode.png")])
    if status == 0:
        figures = json.loads(part.read_text())
        cases = figures.pop("cases")
        print(record.write("decode", [{"case": {"setup": "all cases"}, **figures}, *cases]))
        part.unlink()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
