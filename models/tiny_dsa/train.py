"""Trains the model of this folder within a wall-clock budget; see README.md.

    python train.py --out DIR --minutes 9

Stages, as DeepSeek trained V3.2: dense pre-training (short, then long contexts), the indexer alone against dense
attention, then sparse training. Each ends at its share of the time that is left once everything is compiled; the
learning rate follows the clock. The weights are saved after every stage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.fx.experimental._config
from attention import choose_dense, choose_sparse, sparse_attention
from batches import Batches
from evaluate import Evaluator
from files import plot, save_model, write_json
from model import Kernels, Mode, TinyDsa, micro_config, tiny_config
from optim import Optimizer
from plan import PLANS, Plan, Stage, divide
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend

FLUSH_STEPS = 10
WARM_UP_STEPS = 40  # of each stage: another length or loss makes the first gradients large
SETBACK = 0.5  # nats over the best of a stage after which training goes back


class Trainer:
    """A model in training, and the record of it."""

    def __init__(self, args: argparse.Namespace, plan: Plan, device: torch.device) -> None:
        self.args, self.plan, self.device = args, plan, device
        config = (tiny_config if args.config == "tiny" else micro_config)(plan.vocab)
        self.model = TinyDsa(config)
        self.model.initialise(args.seed)
        if args.resume:
            self.model.load_state_dict(load_file(args.resume))
        self.model.to(device)
        self.optimizer = Optimizer(self.model, args.index_rate)
        self.kernels = Kernels()
        self.rate_scale = 1.0
        self.steps = self.tokens = 0
        self.metrics: dict[str, Any] = {"stages": [], "events": []}

    def autocast(self) -> AbstractContextManager[Any]:
        """bfloat16 on a GPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def choose_kernels(self, compiled: bool) -> None:
        """Measures attention implementations at the size of the usual stage."""
        config, length = self.model.config, self.plan.evaluation_length
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        shape = (self.plan.batch_tokens // length, config.num_attention_heads, length, width)
        dense, dense_report = choose_dense(shape, config.v_head_dim, self.device)
        sparse, sparse_report = choose_sparse(shape, config.v_head_dim, self.device, compiled)
        self.kernels = Kernels.compiled(dense, sparse) if compiled else Kernels(dense, sparse)
        self.metrics["kernels"] = {"dense": dense_report, "sparse": sparse_report, "compiled": compiled}
        self.say(f"attention: {json.dumps(self.metrics['kernels'])}")

    def evaluation_kernels(self) -> Kernels:
        """Those that take other sequence lengths without compiling."""
        if self.device.type != "cuda":
            return self.kernels
        return replace(self.kernels, sparse=partial(sparse_attention, backend=SDPBackend.EFFICIENT_ATTENTION))

    def warm_up(self, planned: list[Stage]) -> dict[str, float]:
        """Seconds of a step of each stage that works here; compiles what training and evaluation use."""
        seconds: dict[str, float] = {}
        for stage in planned:
            for _ in range(3):
                self._wait()
                started = time.time()
                rows = max(1, self.plan.batch_tokens // stage.length)
                tokens = torch.randint(self.plan.vocab, (rows, stage.length + 1), device=self.device)
                self._backward(tokens, stage.mode)
                self.optimizer.clear()
                self._wait()
                seconds[stage.name] = time.time() - started
            self.say(f"a step of stage {stage.name} takes {seconds[stage.name]:.3f} s")
        with torch.no_grad(), self.autocast():
            length = self.plan.evaluation_length
            tokens = torch.randint(self.plan.vocab, (self.plan.batch_tokens // length, length + 1), device=self.device)
            self.model.token_losses(tokens, Mode(self.model.config.index_topk), self.evaluation_kernels())
        return seconds

    def train(self, stage: Stage, batches: Batches, seconds: float, step_seconds: float) -> None:
        """One stage, for so many seconds."""
        started = time.time()
        record: dict[str, Any] = {"name": stage.name, "length": stage.length, "curve": []}
        self.metrics["stages"].append(record)
        rows = max(1, self.plan.batch_tokens // stage.length)
        first_step, pending, best = self.steps, [], float("inf")
        good, queued = self._copy(), deque[torch.cuda.Event]()
        while self.steps == first_step or time.time() + step_seconds < started + seconds:
            if self.steps - first_step == (self.args.max_steps or None):
                break
            progress = min(1.0, (time.time() - started) / seconds)
            rate = stage.rates[0] + progress * (stage.rates[1] - stage.rates[0])
            rate *= self.args.lr * self.rate_scale * min(1.0, (self.steps - first_step + 1) / WARM_UP_STEPS)
            pending.append(self._backward(batches.next(rows, stage.length), stage.mode))
            self.optimizer.step(rate)
            self.steps += 1
            self.tokens += rows * stage.length
            self._keep_pace(queued)
            if len(pending) == FLUSH_STEPS:
                means = torch.stack(pending).mean(0).tolist()  # waits for the device
                pending.clear()
                if all(np.isfinite(means)) and means[0] < best + SETBACK:
                    good, best = self._copy(), min(best, means[0])
                    record["curve"].append(
                        [self.steps, round(time.time() - self.args.started, 2), self.tokens, rate, *means]
                    )
                else:
                    self._roll_back(good, f"losses {means}")
                if (self.steps - first_step) % (20 * FLUSH_STEPS) == 0:
                    self.say(f"{stage.name}: step {self.steps}, loss {means[0]:.4f}, indexer {means[1]:.4f}")
        self._wait()
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            self._roll_back(good, "weights not finite")
        elapsed, steps = time.time() - started, self.steps - first_step
        record |= {"steps": steps, "seconds": elapsed, "tokens": steps * rows * stage.length}
        record["tokens_per_second"] = record["tokens"] / elapsed
        last = record["curve"][-1][4:] if record["curve"] else []
        self.say(f"{stage.name}: {steps} steps, {record['tokens_per_second']:,.0f} tokens/s, losses {last}")

    def say(self, text: str) -> None:
        """Prints with the clock."""
        print(f"[{time.time() - self.args.started:6.1f} s] {text}", flush=True)

    def _backward(self, tokens: Tensor, mode: Mode) -> Tensor:
        """Gradients of a batch; its two losses, [2]."""
        with self.autocast():
            losses, index_loss = self.model.token_losses(tokens, mode, self.kernels)
        loss = losses.mean() if len(losses) else torch.zeros((), device=self.device)
        (loss + index_loss).backward()
        return torch.stack([loss.detach(), index_loss.detach()])

    def _keep_pace(self, queued: deque[torch.cuda.Event]) -> None:
        """Lets the host be two steps ahead at most: its clock decides when a stage ends."""
        if self.device.type == "cuda":
            queued.append(torch.cuda.Event())
            queued[-1].record()
            if len(queued) > 2:
                queued.popleft().synchronize()

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @torch.no_grad()
    def _roll_back(self, good: list[Tensor], reason: str) -> None:
        for parameter, value in zip(self.model.parameters(), good, strict=True):
            parameter.copy_(value)
        self.optimizer = Optimizer(self.model, self.args.index_rate)
        self.rate_scale /= 2
        self.metrics["events"].append(f"step {self.steps}: {reason}; went back, halved the learning rate")
        self.say(self.metrics["events"][-1])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def prepare_kernels(trainer: Trainer, planned: list[Stage], compiled: bool) -> dict[str, float]:
    """Chooses and warms up; without compilation if that fails, and without the last stage if only that fails."""
    try:
        trainer.choose_kernels(compiled)
        return trainer.warm_up(planned)
    except Exception as problem:  # anything may fail inside a compiler; none of it is worth the run
        trainer.say(traceback.format_exc())
        trainer.metrics["events"].append(f"warm-up: {type(problem).__name__}: {str(problem)[:500]}")
    trainer.optimizer.clear()
    if compiled:
        return prepare_kernels(trainer, planned, compiled=False)
    return trainer.warm_up([stage for stage in planned if stage.name != "sparse_long"])


def start_data(args: argparse.Namespace, plan: Plan, folder: Path) -> subprocess.Popen[bytes]:
    """Reads and tokenises in a process of its own, meanwhile."""
    script = Path(__file__).parent / "data.py"
    lengths = ",".join(f"{length}:{count}" for length, count in plan.retrieval.items())
    command = [sys.executable, str(script), "--out", str(folder), "--vocab", str(plan.vocab), "--lengths", lengths]
    command += ["--seed", str(args.seed), "--max-bytes", str(args.max_bytes), "--workers", str(args.workers)]
    if args.roots:
        command += ["--roots", *map(str, args.roots)]
    if args.resume:
        command += ["--tokenizer", str(args.resume.parent / "tokenizer.json")]
    return subprocess.Popen(command)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """For metrics.json."""
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    return {"gpu": gpu, "cpus": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


def run(args: argparse.Namespace, data_folder: Path) -> dict[str, Any]:
    """The whole run; returns what it also writes to metrics.json."""
    plan = PLANS[args.config]
    end = args.started + 60 * args.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = start_data(args, plan, data_folder)
    try:
        trainer = Trainer(args, plan, device)
        names = args.stages.split(",") if args.stages else [stage.name for stage in plan.stages]
        planned = [stage for stage in plan.stages if stage.name in names]
        step_seconds = prepare_kernels(trainer, planned, args.compile and device.type == "cuda")
        trainer.say("ready; waiting for the data")
        if data.wait() != 0:
            raise RuntimeError(f"data.py failed with code {data.returncode}")
    finally:
        if data.poll() is None:
            data.kill()
    tokenizer_file = data_folder / "tokenizer.json"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "DATA.md").write_text((data_folder / "DATA.md").read_text())
    batches = Batches(data_folder, device, args.seed + bool(args.resume), args.retrieval_share)
    summary = json.loads((data_folder / "data.json").read_text())
    trainer.metrics |= {
        "data": summary,
        "machine": describe_machine(device),
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "config": trainer.model.config.to_dict(),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }
    trainer.say(f"data: {json.dumps(summary)}")
    reserve = min(args.evaluation_seconds, 0.25 * 60 * args.minutes)
    division = divide(planned, step_seconds, max(1.0, end - reserve - time.time()))
    trainer.say("seconds: " + ", ".join(f"{stage.name} {seconds:.0f}" for stage, seconds in division))
    for number, (stage, _) in enumerate(division):
        # Divided anew each time: a stage that took longer than planned costs all later ones a little.
        rest = [later for later, _ in division[number:]]
        seconds = divide(rest, step_seconds, max(1.0, end - reserve - time.time()))[0][1]
        trainer.train(stage, batches, seconds, step_seconds[stage.name])
        save_model(trainer.model, tokenizer_file, args.out)
        write_json(args.out / "metrics.json", trainer.metrics)
    # What is measured is what was saved: weights rounded to bfloat16.
    trainer.model.load_state_dict(load_file(args.out / "model.safetensors"))
    evaluator = Evaluator(
        trainer.model, trainer.evaluation_kernels(), Tokenizer.from_file(str(tokenizer_file)),
        np.load(data_folder / "heldout.npy"), plan.batch_tokens, trainer.autocast, end - 0.1 * reserve,
    )  # fmt: skip
    trainer.metrics["evaluation"] = evaluator.run(plan.evaluation_length, plan.contexts, args.out)
    if device.type == "cuda":
        trainer.metrics["peak_gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    trainer.metrics["seconds"] = time.time() - args.started
    write_json(args.out / "metrics.json", trainer.metrics)
    plot(trainer.metrics, args.out / "loss.png")
    trainer.say(json.dumps(trainer.metrics["evaluation"]))
    return trainer.metrics


def _process_age() -> float:
    """Seconds since this process began (Linux)."""
    began = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - began


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, metrics.json, DATA.md, loss.png")
    parser.add_argument("--minutes", type=float, default=9.0, help="wall-clock time for everything")
    parser.add_argument("--resume", type=Path, help="model.safetensors of an earlier run, its tokenizer.json beside it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--index-rate", type=float, default=0.5, help="the indexer's learning rate, relative to --lr")
    parser.add_argument("--stages", help="names of stages to run, separated by commas; default all")
    parser.add_argument("--max-steps", type=int, default=0, help="of each stage, for tests; 0 for as many as fit")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--config", choices=sorted(PLANS), default="tiny")
    parser.add_argument("--retrieval-share", type=float, default=0.1, help="of the sequences, synthetic retrieval text")
    parser.add_argument("--evaluation-seconds", type=float, default=75.0)
    parser.add_argument("--roots", type=Path, nargs="*", help="folders to learn from instead of what is installed")
    parser.add_argument("--max-bytes", type=int, default=400_000_000, help="of text")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that tokenise")
    args = parser.parse_args(argv)
    args.started = time.time() - (_process_age() if argv is None else 0.0)  # the imports count, too
    with tempfile.TemporaryDirectory() as folder:
        return run(args, Path(folder))


if __name__ == "__main__":
    # Each stage has shapes and modes of its own; past this limit, torch would fall back to slow kernels silently.
    torch._dynamo.config.cache_size_limit = 64
    torch.fx.experimental._config.use_duck_shape = False  # two sizes that are equal once need not stay so
    main()
