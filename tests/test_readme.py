"""README's example of the Python API runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    environment = {**os.environ, "ECHO_DEVICE": "cpu", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def read_lines(path):") and "class Session:" in done.stdout
