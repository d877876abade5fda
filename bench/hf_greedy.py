"""Whether echo writes what transformers writes: greedy decoding of the trained model by both, in float32.

Both compute the same function in another order (transformers expands latents into keys and values, echo attends to
latents), so logits differ in their last bits, and by more where the k-th and the next index score are so close that
both select another token. Tokens may differ where the two likeliest are as close as that. After a first difference both
continue different texts; what follows it is not compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import record
import torch
from generation import (
    Tokens,
    blocks,
    decode,
    device_named,
    draw_prompts,
    likeliest,
    load_model,
    load_tokenizer,
    read,
    texts,
)
from torch import Tensor

import echo
from echo import hf


@dataclass
class Comparison:
    """One prompt's continuation by both.

    Attributes:
        equal: tokens before the first difference.
        logit_difference: the largest of any logit while both had the same text.
        margin: the least distance that transformers saw between the two likeliest tokens of a step.
        difference: of the first token that differs; None if all are equal.
    """

    equal: int
    logit_difference: float
    margin: float
    difference: dict[str, Any] | None


def compare(ours: Tokens, our_logits: Tensor, theirs: Tokens, their_logits: Tensor) -> Comparison:
    """Compares [steps] tokens, and the logits [steps, vocab] that they were chosen from."""
    equal = next((step for step, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))
    same_text = slice(0, equal + 1)
    apart = (our_logits - their_logits)[same_text].abs().amax(-1)
    two = their_logits[same_text].topk(2).values
    margins = two[:, 0] - two[:, 1]
    difference = None
    if equal < len(ours):
        difference = {
            "step": equal,
            "ours": ours[equal],
            "theirs": theirs[equal],
            "logit_gap": float(their_logits[equal, theirs[equal]] - their_logits[equal, ours[equal]]),
            "logit_difference": float(apart[equal]),
        }
    return Comparison(equal, float(apart.max()), float(margins.min()), difference)


def by_transformers(model: hf.DsaModel, prompt: Tokens, steps: int) -> tuple[Tokens, Tensor]:
    """Tokens [steps] and logits [steps, vocab] of transformers' own `generate`."""
    inputs = torch.tensor([prompt], device=model.device)
    model.model.generation_config.eos_token_id = None  # a text goes on
    found = model.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits)


def by_echo(rt: echo.Runtime, prompt: Tokens, steps: int) -> tuple[Tokens, Tensor]:
    """The same through a runtime whose forward is captured."""
    chosen, logits = [], []
    with rt.open_session(len(prompt) + steps) as session:
        read(rt, session, prompt[:-1])
        for _, (tokens, scores) in zip(range(steps), decode(rt, [session], prompt[-1:], likeliest), strict=False):
            chosen += tokens
            logits.append(scores.clone())
    return chosen, torch.cat(logits)


def main(arguments: Sequence[str] | None = None) -> int:
    """Continues all prompts with both and records the case; status 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=24, metavar="N")
    parser.add_argument("--shortest", type=int, default=100, metavar="N", help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=2000, metavar="N", help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="tokens each prompt is continued by")
    parser.add_argument("--pool-slots", type=int, metavar="N", help="echo's pool (default: 4 x (top-k + 1))")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--result", default="hf_greedy", metavar="NAME", help="results go to NAME.json")
    options = parser.parse_args(arguments)
    device = device_named(options.device)
    model = load_model(device, torch.float32)
    shape = model.shape("fp32", "fp32")
    slots = options.pool_slots or 4 * (shape.top_k + 1)
    prompts = draw_prompts(*texts(load_tokenizer()), options.prompts, options.shortest, options.longest)
    longest = options.longest + options.new_tokens
    results, seconds, fetched = [], {"echo": 0.0, "transformers": 0.0}, 0
    with echo.Runtime(
        shape, device=device, host_tokens=blocks(longest), max_context=longest, max_batch=1, gpu_slots=slots
    ) as rt:
        rt.capture(model.forward, [1])
        for prompt in prompts:
            started = time.perf_counter()
            ours = by_echo(rt, prompt, options.new_tokens)
            between = time.perf_counter()
            theirs = by_transformers(model, prompt, options.new_tokens)
            seconds["echo"] += between - started
            seconds["transformers"] += time.perf_counter() - between
            results.append(compare(*ours, *theirs))
            print(f"{len(prompt)} tokens: {results[-1]}", flush=True)
        fetched = sum(layer.misses for layer in rt.stats().layers)
    case = {
        "case": {"device": device, "prompts": len(prompts), "new_tokens": options.new_tokens},
        "build": echo.build_info(),
        "row_format": shape.row_format,
        "pool_slots": slots,
        "prompt_tokens": {"shortest": len(prompts[0]), "longest": len(prompts[-1])},
        "tokens": {"all": len(prompts) * options.new_tokens, "equal": sum(result.equal for result in results)},
        "largest_logit_difference": max(result.logit_difference for result in results),
        "smallest_margin": min(result.margin for result in results),
        "differences": [{"prompt": i, **r.difference} for i, r in enumerate(results) if r.difference is not None],
        "rows_fetched": fetched,
        "seconds": seconds,
    }
    print(record.write(options.result, [case]).read_text())
    return 1 if case["differences"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
