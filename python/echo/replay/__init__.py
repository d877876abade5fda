"""`echo-kv replay`: a trace drives a runtime's pools, selection and predictor, without a model.

The runtime is driven once as it is, once with prefetches and once with forecasts; what its pools did in the second half
of the steps is shown beside LRU and Belady's optimum on the same selections.
"""

from echo.replay.command import add_command

__all__ = ["add_command"]
