"""Selections of decode steps as data: recorded, generated, replayed through replacement policies.

No public traces of DSA selections exist. `synthetic.generate` makes some with published miss rates, `SelectionRecorder`
takes real ones from a model, `policies.misses` says what a pool of a given size would have to fetch.
"""

from __future__ import annotations

from echo.traces.recorder import SelectionRecorder
from echo.traces.trace import Trace

__all__ = ["SelectionRecorder", "Trace"]
