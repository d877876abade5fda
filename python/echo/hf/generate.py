"""Text from prompts, for those who do not bring a scheduler of their own."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from echo import Batch, CapacityError, InvalidArgument, Runtime, Session
from echo.decoding import draw, read
from echo.hf.model import DsaModel
from echo.settings import check_seed


@dataclass
class _Text:
    """A prompt that is being continued."""

    session: Session
    written: list[int]
    draws: torch.Generator


def generate(
    rt: Runtime,
    model: DsaModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: Collection[int] | None = None,
    captured: bool = False,
) -> list[list[int]]:
    """Continues prompts, as many at once as batch and host pool hold; the others follow as room appears.

    Sessions are opened and closed here. Neighbours in a batch touch a continuation only through the rounding
    of torch's matrix products, which may differ between batch sizes.

    Args:
        rt: a runtime of the model's shape, on its device.
        model: the model.
        prompts: token ids, at least one in each.
        max_new_tokens: most tokens to write for each prompt.
        temperature: 0 takes the likeliest token; above, tokens are drawn from the logits divided by it.
        seed: of the draws; each prompt has its own.
        stop_tokens: the first of them ends a continuation and is its last token; default those of the model.
        captured: decode by replaying what `rt.capture` captured, which must be `model.forward`.

    Returns:
        New tokens for each prompt, in the order of the prompts.

    Raises:
        InvalidArgument: naming what is malformed.
        CapacityError: a prompt and its continuation do not fit the runtime even while nothing else runs here.
    """
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise InvalidArgument(f"max_new_tokens: {max_new_tokens!r} given, expected an integer, at least 1")
    if not isinstance(temperature, Real) or not temperature >= 0.0:
        raise InvalidArgument(f"temperature: {temperature!r} given, expected 0 or more")
    if str(model.device) != rt.device:
        raise InvalidArgument(f"model: it is on {model.device}, expected the runtime's device, {rt.device}")
    check_seed(seed)
    try:
        ends = frozenset(model.stop_tokens if stop_tokens is None else map(operator.index, stop_tokens))
    except TypeError as error:
        raise InvalidArgument(f"stop_tokens: {stop_tokens!r} given, expected a list of token ids") from error
    context = rt.plan.config.max_context
    if max_new_tokens >= context:
        raise InvalidArgument(f"max_new_tokens: {max_new_tokens} given, expected less than max_context = {context}")
    room = context - max_new_tokens
    waiting = deque(enumerate(_checked(prompts, model.config.vocab_size, room)))
    results: list[list[int]] = [[] for _ in waiting]
    running: list[_Text] = []
    max_batch = rt.plan.config.max_batch

    def write(texts: list[_Text], logits: Tensor) -> None:
        for text, token in zip(texts, draw(logits, temperature, [t.draws for t in texts]), strict=True):
            text.written.append(token)
            if token in ends or len(text.written) == max_new_tokens:
                text.session.close()

    try:
        while waiting or running:
            while waiting and len(running) < max_batch:
                number, prompt = waiting[0]
                draws = torch.Generator().manual_seed(int(seed) + number)
                try:
                    session = rt.open_session(len(prompt) + max_new_tokens)
                except CapacityError:
                    if not running:
                        raise
                    break
                waiting.popleft()
                running.append(_Text(session, results[number], draws))
                write(running[-1:], read(rt, session, prompt, model.forward))
                running = [text for text in running if not text.session.closed]
            if running:
                batch = Batch([text.session for text in running], [text.written[-1] for text in running])
                write(running, rt.step(batch, None if captured else model.forward))
                running = [text for text in running if not text.session.closed]
    finally:
        for text in running:
            text.session.close()
    return results


def _checked(prompts: Sequence[Sequence[int]], vocab: int, room: int) -> list[list[int]]:
    checked = []
    try:
        given = list(prompts)
    except TypeError as error:
        raise InvalidArgument(f"prompts: {prompts!r} given, expected a list of them") from error
    for number, prompt in enumerate(given):
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise InvalidArgument(f"prompts: entry {number} is {prompt!r}, expected token ids") from error
        if not tokens:
            raise InvalidArgument(f"prompts: entry {number} is empty, expected at least one token")
        if not all(0 <= token < vocab for token in tokens):
            raise InvalidArgument(f"prompts: entry {number} has tokens outside 0..{vocab - 1}")
        if len(tokens) > room:
            raise InvalidArgument(
                f"prompts: entry {number} has {len(tokens)} tokens, expected at most {room}, which is max_context less "
                "max_new_tokens"
            )
        checked.append(tokens)
    return checked
