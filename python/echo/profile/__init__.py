"""`echo-kv profile`: where the time of a decode step goes.

On a GPU a captured step is replayed twice: between events, which say how long it takes, and under torch's profiler,
whose kernels are put down to verbs and layers. On the CPU the verbs of an eager step are timed. Both give the same
tables and the same trace.
"""

from echo.profile.command import add_command

__all__ = ["add_command"]
