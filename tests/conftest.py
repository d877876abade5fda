"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

# Before torch is loaded: threads that spin while they wait cost minutes where other programs keep the cores busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch
from support.gpu import watched
from support.rig import Rig
from support.synthetic import FusedModel, SyntheticModel

import echo

# The same examples in every run, so that a red run can be repeated; --hypothesis-profile=explore looks further.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, print_blob=True, max_examples=120, stateful_step_count=50
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, stateful_step_count=80)
hypothesis.settings.load_profile("repeatable")


def no_cuda_reason() -> str | None:
    """Why there is no GPU to test on, None if there is one."""
    try:
        echo.machine_limits("cuda")
    except echo.NotSupported as error:
        return str(error)
    return None if torch.cuda.is_available() else "torch has no CUDA"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    if request.param == "cuda" and (reason := no_cuda_reason()) is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def no_settings_from_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """ECHO_* variables of the caller's shell change no test, but for ECHO_KERNELS on a GPU: all hold for either."""
    kept = {"kernels"} if request.node.get_closest_marker("gpu") else set()
    for setting in echo.config_fields():
        if setting.name in kept:
            continue
        monkeypatch.delenv(f"ECHO_{setting.name.upper()}", raising=False)


@pytest.fixture
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test of a GPU hangs for ever."""
    with watched(request.config):
        yield


@pytest.fixture
def make_runtime(device: str) -> Iterator[Callable[..., echo.Runtime]]:
    """Makes small runtimes on the device, and closes them."""
    made: list[echo.Runtime] = []

    def make(shape: echo.ModelShape, **settings: Any) -> echo.Runtime:
        small = {"host_tokens": 2048, "max_batch": 4, "max_context": 1024, "max_sessions": 16, "prefill_chunk": 64}
        made.append(echo.Runtime(shape, **{**small, "device": device, **settings}))
        return made[-1]

    yield make
    for runtime in made:
        runtime.close()


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """The synthetic model works on a few rows at a time; threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_rig(make_runtime: Callable[..., echo.Runtime], device: str, one_torch_thread: None) -> Callable[..., Rig]:
    """Makes a runtime with a synthetic model; `model` holds arguments of the model, all others are settings."""

    def make(
        shape: echo.ModelShape,
        model: dict[str, Any] | SyntheticModel | None = None,
        fused: bool = False,
        **settings: Any,
    ) -> Rig:
        if not isinstance(model, SyntheticModel):
            kind = FusedModel if fused else SyntheticModel
            model = kind(shape, device=device, **(model or {}))
        return Rig(make_runtime(shape, **settings), model)

    return make
