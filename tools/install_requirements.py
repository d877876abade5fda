"""Installs what pyproject.toml asks for, without building the project.

    install_requirements.py build    what builds the wheel, CMake and ninja included where they are missing
    install_requirements.py EXTRA    the packages of one extra, e.g. lint

For builds without pip's isolated environment, which would compile every file anew each time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]


def install(requirements: list[str]) -> None:
    if requirements:
        subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", *requirements])


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    (what,) = sys.argv[1:]
    if what == "build":
        install(project["build-system"]["requires"])
        # Only the build backend knows whether the CMake and ninja of this machine will do.
        query = "from scikit_build_core import build; print(*build.get_requires_for_build_wheel({}), sep='\\n')"
        answer = subprocess.run([sys.executable, "-c", query], cwd=root, check=True, text=True, capture_output=True)
        install(answer.stdout.split())
    else:
        install(project["project"]["optional-dependencies"][what])


if __name__ == "__main__":
    main()
