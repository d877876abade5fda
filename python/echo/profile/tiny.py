"""The model that ships, decoding the sources of the package: each session from another place on."""

from __future__ import annotations

from typing import Any

import echo
from echo.decoding import read
from echo.demo.text import read_text
from echo.extras import HF, load_hf
from echo.profile.workload import Workload

_APART = 64  # tokens between the places at which sessions go on


def tiny_workload(device: str, batch: int, length: int, pool: float, steps: int, settings: dict[str, Any]) -> Workload:
    """Reads the text.

    Args:
        device: 'cpu' or 'cuda:N'.
        batch: sessions.
        length: tokens of the longest.
        pool: slots of a layer per session, in multiples of top-k.
        steps: how many will be decoded.
        settings: others of the runtime.

    Raises:
        InvalidArgument: naming `length`, if the model's context or the text has no room for it.
        NotSupported: transformers is missing.
    """
    hf = load_hf(f"{HF}, or ask for --synthetic")
    model = hf.DsaModel(hf.tiny_dsa_model(device=device))
    room = model.config.max_position_embeddings - steps
    if not 32 <= length <= room:
        raise echo.InvalidArgument(f"length: {length} given, expected 32 to {room}, which the model's context holds")
    text = read_text(hf.tiny_dsa_tokenizer(), length + steps)
    shape = model.shape("fp8_656")
    kv = _prefilled(model, shape, device, text[:length], settings)
    apart = min(_APART, length // (2 * batch))

    def fill(runtime: echo.Runtime, session: echo.Session, number: int) -> None:
        runtime.import_kv(session, kv)
        session.truncate(length - number * apart)

    return Workload(
        name="tiny_dsa on its own sources",
        shape=shape,
        device=device,
        batch=batch,
        length=length,
        pool=pool,
        forward=model.forward,
        fill=fill,
        token=lambda number, step: text[length - number * apart + step],
        settings=settings,
    )


def _prefilled(
    model: Any, shape: echo.ModelShape, device: str, text: list[int], settings: dict[str, Any]
) -> echo.KvRuns:
    """The text's KV; it outlives its runtime."""
    with echo.Runtime(
        shape,
        **settings,
        device=device,
        host_tokens=-(-len(text) // 64) * 64,
        max_context=len(text),
        max_batch=1,
        query_rows=1,
        gpu_slots=max(len(text), 64 * (shape.top_k + 1)),
    ) as runtime:
        session = runtime.open_session(len(text))
        read(runtime, session, text, model.forward)
        return runtime.export_kv(session)
