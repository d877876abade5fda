"""Selections and scores of decode steps as data: recorded, generated, replayed through replacement policies.

No public traces of DSA selections exist. `synthetic.generate` makes some with published miss rates, `SelectionRecorder`
takes real ones from a model, `comparison.compare` says what pools of given sizes would have to fetch under which
policies, `drive.drive` what a runtime with such pools does, `statistics` what else there is to know.
"""

from __future__ import annotations

from echo.traces.recorder import SelectionRecorder
from echo.traces.trace import Trace

__all__ = ["SelectionRecorder", "Trace"]
