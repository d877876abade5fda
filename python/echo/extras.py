"""What is not installed with the package: one sentence for whoever needs it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from echo._core import NotSupported

TORCH = "pip install torch"
HF = 'pip install ".[hf]" in the source tree of echo'
DEMO = 'pip install ".[demo]" in the source tree of echo'


def lacking(error: ImportError, install: str, what: str = "") -> NotSupported:
    """What to raise where an import failed.

    Args:
        error: of the import.
        install: the command that mends it.
        what: begins the message.
    """
    return NotSupported(f"{what and what + ': '}{reason(error)}; {install}")


def reason(error: ImportError) -> str:
    """The package that is missing, or what one that is there has not got."""
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    package = (cause.name or "").partition(".")[0]
    return f"{package} is missing" if package and find_spec(package) is None else str(cause)


def require_torch(install: str = TORCH) -> None:
    """Raises as `lacking` says, if torch is missing; to be asked before transformers, which would warn at length."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise lacking(error, install) from error


def load_hf(install: str = HF) -> Any:
    """`echo.hf`, for commands: its progress bars are off.

    Raises:
        NotSupported: as `lacking` says, if torch or transformers is missing, or too old.
    """
    require_torch(install)
    try:
        from transformers.utils import logging

        from echo import hf
    except ImportError as error:
        raise lacking(error, install) from error
    logging.disable_progress_bar()
    return hf
