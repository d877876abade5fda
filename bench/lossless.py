"""Whether offloading changes anything: a trained model decodes with everything on the GPU, and with smaller pools.

Every pool reads the same prompts and continues them greedily and by sampling. Tokens, the selections of all layers and
the logits of each step are compared bit for bit with those of the pool that holds everything; what differs is counted,
and the first difference located. With the smallest pool, the sessions are decoded once more in reversed order.

Nothing is compared before a run of a batch is over: it keeps its selections and logits on the device, where they are
compared, so that a step waits only for the tokens that the next one needs.

Besides, random scenarios of whole steps of a synthetic model are compared under all settings that may change no bit.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import record
import scenarios
import torch
from generation import (
    KINDS,
    Pick,
    Sampler,
    Tokens,
    blocks,
    decode,
    device_named,
    draw_prompts,
    likeliest,
    load_model,
    load_tokenizer,
    texts,
)
from torch import Tensor

import echo
from echo import hf
from echo.decoding import read


@dataclass
class SelectionKeeper:
    """An observer that keeps the last decode step's selections.

    Attributes:
        buffer: int32 [layers, sessions, top_k], at a fixed address so that a CUDA graph can fill it.
    """

    buffer: Tensor

    def __call__(self, p: echo.ForwardPass, tensors: hf.LayerTensors) -> None:
        """Copies the selection of one layer; of a captured step on a GPU, a replay does so again."""
        if not p.is_prefill:
            self.buffer[tensors.layer, : p.rows].copy_(torch.from_dlpack(p.selection))


@dataclass
class Decoded:
    """What one batch gave.

    Attributes:
        tokens: int64 [steps, sessions], chosen by each step.
        selections: int32 [steps, layers, sessions, top_k].
        logits: [steps, sessions, vocab].
    """

    tokens: Tensor
    selections: Tensor
    logits: Tensor

    def reversed(self) -> Decoded:
        """The same with the sessions in reversed order."""
        return Decoded(self.tokens.flip(1), self.selections.flip(2), self.logits.flip(1))


@dataclass
class Tally:
    """Comparisons of decoded batches, added up; each counts units that are equal as a whole.

    Attributes:
        compared: tokens, selections (of a step, layer and session), logits (of a step and session).
        equal: of them.
        first: the first difference: step, prompt, and for selections the layer.
    """

    compared: dict[str, int] = field(default_factory=dict)
    equal: dict[str, int] = field(default_factory=dict)
    first: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, got: Decoded, wanted: Decoded, prompts: Sequence[int]) -> None:
        """Compares one batch, whose sessions continue `prompts` (numbers for the report)."""
        self._add("tokens", got.tokens != wanted.tokens, prompts)
        self._add("selections", (got.selections != wanted.selections).any(-1), prompts)
        self._add("logits", (_bits(got.logits) != _bits(wanted.logits)).any(-1), prompts)

    def _add(self, what: str, different: Tensor, prompts: Sequence[int]) -> None:
        """Adds bool [steps, (layers,) sessions]."""
        places = different.nonzero().tolist()  # in order of steps
        self.compared[what] = self.compared.get(what, 0) + different.numel()
        self.equal[what] = self.equal.get(what, 0) + different.numel() - len(places)
        if not places:
            return
        step, *layer, session = places[0]
        if what not in self.first or step < self.first[what]["step"]:
            self.first[what] = {"step": step, **({"layer": layer[0]} if layer else {}), "prompt": prompts[session]}

    @property
    def lossless(self) -> bool:
        """Whether nothing differed."""
        return self.compared == self.equal

    def figures(self) -> dict[str, Any]:
        """For the case of a benchmark."""
        counts = {what: {"compared": n, "equal": self.equal[what]} for what, n in self.compared.items()}
        return {**counts, "first_difference": self.first or None}


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view({2: torch.int16, 4: torch.int32}[numbers.element_size()])


@dataclass
class Costs:
    """Seconds and recalls of one kind of decoding with one pool."""

    seconds: float = 0.0
    hits: int = 0
    misses: int = 0

    def add(self, seconds: float, before: echo.RuntimeStats, after: echo.RuntimeStats) -> None:
        """Adds what happened between two looks at the counters."""
        self.seconds += seconds
        self.hits += sum(layer.hits for layer in after.layers) - sum(layer.hits for layer in before.layers)
        self.misses += sum(layer.misses for layer in after.layers) - sum(layer.misses for layer in before.layers)

    def figures(self) -> dict[str, Any]:
        """For the case of a benchmark."""
        rate = self.hits / max(1, self.hits + self.misses)
        return {"rows_fetched": self.misses, "hit_rate": rate, "seconds": self.seconds}


@dataclass
class Experiment:
    """Prompts in batches, and what all pools do with them.

    Attributes:
        prompts: token ids.
        batch: sessions decoded together; the last batch may be smaller.
        steps: new tokens of each session.
        temperature: of sampling.
        shape: of the model, with the formats of rows and keys.
    """

    model: hf.DsaModel
    prompts: list[Tokens]
    batch: int
    steps: int
    temperature: float
    shape: echo.ModelShape

    def __post_init__(self) -> None:
        """Deals the prompts out, so that all batches have short and long ones."""
        groups = -(-len(self.prompts) // self.batch)
        self.groups = [range(g, len(self.prompts), groups) for g in range(groups)]
        self.host_tokens = max(sum(blocks(self._capacity(i)) for i in group) for group in self.groups)
        size = (self.shape.layers, self.batch, self.shape.top_k)
        self.model.observer = SelectionKeeper(torch.full(size, -1, dtype=torch.int32, device=self.model.device))
        self._wanted: dict[tuple[str, int], Decoded] = {}

    def pools(self, count: int) -> list[int]:
        """Slots of so many pools: the fewest that a runtime takes, up to half of a batch's tokens."""
        least = self.batch * (self.shape.top_k + 1)
        most = max(least, self.host_tokens // 2)
        ratios = [i / max(1, count - 1) for i in range(count)]
        return list(dict.fromkeys(round(least * (most / least) ** ratio) for ratio in ratios))

    def run(self, slots: int, order_too: bool = False) -> tuple[list[dict[str, Any]], bool]:
        """Cases of one pool, and whether nothing differed; the first pool is what later ones are compared with."""
        kinds = ["greedy", "sampled", *(["greedy, reversed"] if order_too else [])]
        costs = {kind: Costs() for kind in ["prefill", *kinds]}
        tallies = {kind: Tally() for kind in kinds}
        with echo.Runtime(
            self.shape,
            device=str(self.model.device),
            host_tokens=self.host_tokens,
            max_context=max(self._capacity(i) for i in range(len(self.prompts))),
            max_sessions=self.batch,
            max_batch=self.batch,
            gpu_slots=slots,
        ) as rt:
            rt.capture(self.model.forward, [self.batch])
            for group in self.groups:
                self._run_group(rt, group, costs, tallies)
        prefill = {f"prefill_{name}": figure for name, figure in costs["prefill"].figures().items()}
        cases = [
            {
                "case": {"device": rt.device, "sampling": kind, "pool_slots": slots},
                "pool_share": slots / self.host_tokens,
                "prompts": len(self.prompts),
                "new_tokens": self.steps,
                **tallies[kind].figures(),
                **costs[kind].figures(),
                **prefill,
            }
            for kind in kinds
        ]
        return cases, all(tally.lossless for tally in tallies.values())

    def _run_group(self, rt: echo.Runtime, group: range, costs: dict[str, Costs], tallies: dict[str, Tally]) -> None:
        before, started = rt.stats(), time.perf_counter()
        sessions = [rt.open_session(self._capacity(i)) for i in group]
        for i, session in zip(group, sessions, strict=True):
            read(rt, session, self.prompts[i][:-1])
        rt.synchronize()
        costs["prefill"].add(time.perf_counter() - started, before, rt.stats())
        for kind, tally in tallies.items():
            sampling, _, order = kind.partition(", ")
            turn = -1 if order else 1
            before, started = rt.stats(), time.perf_counter()
            pick = Sampler(group, self.temperature) if sampling == "sampled" else likeliest
            got = self._decode(rt, sessions[::turn], group[::turn], pick)
            rt.synchronize()
            costs[kind].add(time.perf_counter() - started, before, rt.stats())
            wanted = self._wanted.setdefault((sampling, group.start), got)
            if wanted is not got:
                tally.add(got, wanted.reversed() if order else wanted, group[::turn])
            for i, session in zip(group, sessions, strict=True):
                session.truncate(len(self.prompts[i]) - 1)
        for session in sessions:
            session.close()

    def _decode(self, rt: echo.Runtime, sessions: list[echo.Session], group: range, pick: Pick) -> Decoded:
        assert isinstance(self.model.observer, SelectionKeeper)
        buffer = self.model.observer.buffer[:, : len(group)]
        selections = buffer.new_empty(self.steps, *buffer.shape)
        chosen, logits = [], []
        following = decode(rt, sessions, [self.prompts[i][-1] for i in group], pick)
        for step, (tokens, scores) in zip(range(self.steps), following, strict=False):
            selections[step].copy_(buffer)
            logits.append(scores.clone())
            chosen.append(tokens)
        return Decoded(torch.tensor(chosen), selections, torch.stack(logits))

    def _capacity(self, prompt: int) -> int:
        return len(self.prompts[prompt]) + self.steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all pools and records the cases; status 1 if anything differed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scenarios", type=int, default=312, metavar="N", help="of whole steps")
    parser.add_argument("--prompts", type=int, default=50, metavar="N")
    parser.add_argument("--shortest", type=int, default=300, metavar="N", help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=6000, metavar="N", help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N", help="tokens each prompt is continued by")
    parser.add_argument("--batch", type=int, default=10, metavar="N", help="sessions decoded together")
    parser.add_argument("--pools", type=int, default=5, metavar="N", help="pools besides the one for everything")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--row-format", choices=("fp8_656", "bf16_1152", "fp32"), default="fp8_656")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--result", default="lossless", metavar="NAME", help="results go to NAME.json")
    options = parser.parse_args(arguments)
    if min(options.scenarios, options.prompts, options.batch, options.pools, options.new_tokens) < 1:
        parser.error("scenarios, prompts, batch, pools and new tokens: expected at least 1")
    if options.shortest < 2:
        parser.error("shortest: expected at least 2 tokens")
    started = time.perf_counter()
    device = device_named(options.device)
    model = load_model(device)
    prompts = draw_prompts(*texts(load_tokenizer()), options.prompts, options.shortest, options.longest)
    if max(map(len, prompts)) + options.new_tokens > model.config.max_position_embeddings:
        parser.error(f"longest prompt and new tokens: the model reads {model.config.max_position_embeddings} tokens")
    shape = model.shape(options.row_format, "fp32" if options.row_format == "fp32" else "fp8")
    batch = min(options.batch, options.prompts)
    experiment = Experiment(model, prompts, batch, options.new_tokens, options.temperature, shape)
    random_steps, differences = scenarios.run(device, options.scenarios)
    print(random_steps, *differences[:20], sep="\n", flush=True)
    cases: list[dict[str, Any]] = []
    lossless = not differences
    for number, slots in enumerate([experiment.host_tokens, *experiment.pools(options.pools)]):
        found, same = experiment.run(slots, order_too=number == 1)
        lossless = lossless and same
        cases += found
        print(*found, sep="\n", flush=True)
    setup = {
        "case": {"device": device, "setup": "all cases"},
        "build": echo.build_info(),
        "row_format": shape.row_format,
        "layers": shape.layers,
        "top_k": shape.top_k,
        "batch": batch,
        "temperature": options.temperature,
        "prompt_kinds": KINDS,
        "prompt_tokens": {"shortest": len(prompts[0]), "longest": len(prompts[-1]), "all": sum(map(len, prompts))},
        "prompts_sha256": hashlib.sha256(repr(prompts).encode()).hexdigest(),
        "seconds": time.perf_counter() - started,
    }
    print(f"{'nothing differs' if lossless else 'DIFFERENCES'}; {setup['seconds']:.0f} s")
    print(record.write(options.result, [setup, *cases, random_steps]))
    return 0 if lossless else 1


if __name__ == "__main__":
    raise SystemExit(main())
