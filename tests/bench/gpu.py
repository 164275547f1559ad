"""`python -m tests.bench.gpu [NAME ...]`: plans beside other ways to save memory, on this CUDA device.

Each model is prepared in a process of its own, all at once; then they are timed one after another, a model's ways
taking turns. Memory is what `torch.cuda.max_memory_allocated` and `max_memory_reserved` count for the process over
three steps from an emptied cache. `ours at X` is planned under the peak that X was measured at. Exit status 1 when a
plan takes more than its budget, or a prediction is more than 1 % off.

Ways: `plain`; `N%`, a plan at that share of what the plain step needs above static; `least`, one under the smallest
budget known to work; `blocks`, every block under `torch.utils.checkpoint`, as `gradient_checkpointing_enable` has it;
`selective`, the same with torchtitan's policy; `compile`, torch.compile with Inductor, and `compile B` under
functorch's `activation_memory_budget` B.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

from passes.device import empty_cache
from planner import Plan, PlannerError
from planner.session import Session, open_session
from tests.bench.peers import selective
from tests.bench.peers.blocks import Blocks, checkpoint_each
from tests.bench.peers.measure import Subject, clear, interleaved_seconds, step
from tests.bench.peers.methods import Failure, quoted
from tests.bench.peers.mincut import patient_dynamo
from tests.gpu.device import CUDA, MIB
from tests.zoo.models import gpt2, resnet50

WAYS = "plain,blocks,selective,60%,40%,least,compile,compile 0.5,compile 0.1"
WARM_UP = 2


def gpt2_medium(batch: int = 8) -> tuple[nn.Module, Any]:
    sizes = {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 50257, "length": 1024}
    model, sample = gpt2(attention="sdpa", batch=batch, **sizes)  # type: ignore[arg-type]
    return model.to(torch.bfloat16), sample


def llama_1b(batch: int = 4) -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    tokens = torch.randint(0, 32000, (batch, 2048))
    return LlamaForCausalLM(config).train().to(torch.bfloat16), {"input_ids": tokens, "labels": tokens}


def resnet(batch: int = 64) -> tuple[nn.Module, Any]:
    model, sample = resnet50(batch=batch)
    sample["pixel_values"] = sample["pixel_values"].contiguous(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), sample  # type: ignore[call-overload]


def u_net(batch: int = 16) -> tuple[nn.Module, Any]:
    from diffusers import UNet2DModel

    attended = ("AttnDownBlock2D", "AttnUpBlock2D")
    model: nn.Module = UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, layers_per_block=2, block_out_channels=(128, 256, 384, 512),
        down_block_types=("DownBlock2D", attended[0], attended[0], attended[0]),
        up_block_types=(attended[1], attended[1], attended[1], "UpBlock2D"),
    )  # fmt: skip
    return model.train(), {"sample": torch.randn(batch, 3, 64, 64), "timestep": torch.arange(batch)}


@dataclass(frozen=True)
class Case:
    """A model, the class of its blocks, and whether its steps run under autocast to bfloat16."""

    make: Callable[..., tuple[nn.Module, Any]]
    block: str
    autocast: bool = False


CASES = {
    "gpt2-medium": Case(gpt2_medium, "GPT2Block"),
    "llama-1b": Case(llama_1b, "LlamaDecoderLayer"),
    "resnet50": Case(resnet, "ResNetBottleNeckLayer", autocast=True),
    "diffusion-u-net": Case(u_net, "ResnetBlock2D", autocast=True),
}


@dataclass
class Way:
    """One way to run a model's step, and what it was measured to take."""

    subject: Subject
    name: str = ""
    plan: Plan | None = None
    allocated: int = 0
    reserved: int = 0
    note: str = ""


class Under(nn.Module):
    """A module whose forward runs in a mode, as a training loop's does."""

    def __init__(self, mode: Callable[[], contextlib.AbstractContextManager[Any]], module: nn.Module) -> None:
        super().__init__()
        self.mode, self.module = mode, module

    def forward(self, **sample: Any) -> Any:
        with self.mode():
            return self.module(**sample)


def now() -> float:
    """Seconds, with everything done on the device that was asked of it."""
    torch.cuda.synchronize()
    return time.perf_counter()


class Bench:
    """One model on the device."""

    def __init__(self, name: str, batch: int | None, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.name, self.case = name, CASES[name]
        torch.manual_seed(0)
        with CUDA:
            model, sample = self.case.make(**({"batch": batch} if batch else {}))
        self.model, self.sample = model, sample
        empty_cache(CUDA)
        self.resident = torch.cuda.memory_allocated()
        self.ways: list[Way] = []
        self.failures: list[str] = []

    def mode(self) -> contextlib.AbstractContextManager[Any]:
        """What the forward runs under."""
        return torch.autocast("cuda", torch.bfloat16) if self.case.autocast else contextlib.nullcontext()

    def way(self, module: nn.Module, **told: Any) -> Way:
        """One that acts on the model's own parameters and buffers."""
        return Way(Subject(Under(self.mode, module), self.model), **told)

    def measure(self, way: Way) -> None:
        """Memory of three steps, each from cleared gradients, after one that compiles what it compiles."""
        step(way.subject.module, self.sample)
        clear(self.model)
        gc.collect()
        torch.cuda.synchronize()
        empty_cache(CUDA)
        torch.cuda.reset_peak_memory_stats()
        strays = torch.cuda.memory_allocated() - self.resident  # of ways measured before
        for _ in range(3):
            step(way.subject.module, self.sample)
            clear(self.model)
        torch.cuda.synchronize()
        way.allocated = torch.cuda.max_memory_allocated() - strays
        way.reserved = torch.cuda.max_memory_reserved()

    def add(self, name: str, make: Callable[[], Way]) -> Way | None:
        """Make a way and measure it; one that does not run, or comes too late, says why."""
        begun = time.perf_counter()
        if begun > self.end:
            self.failures.append(f"| {self.name} | {name} | not run: --seconds were up |")
            return None
        try:
            way = make()
            way.name = name
            self.measure(way)
        except (PlannerError, *Failure) as error:
            self.failures.append(f"| {self.name} | {name} | {quoted(error)} |")
            return None
        way.note = f"{time.perf_counter() - begun:.0f} s to prepare; {way.note}"
        self.ways.append(way)
        print(f"{self.name}: {name}: {way.allocated / MIB:.1f} MiB; {way.note}", file=sys.stderr, flush=True)
        return way

    def prepare(self, names: list[str], **options: Any) -> None:
        """The plain step and the named ways, and after each a plan under its peak."""
        self.add("plain", lambda: self.way(self.model))
        begun = time.perf_counter()
        with self.mode():
            session = open_session(self.model, self.sample, progress=False, keep_outputs=False, **options)
        print(f"{self.name}: captured in {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        static, plain = session.problem.static_bytes, session.plain_peak_bytes
        for name in names:
            if name.endswith("%"):
                budget = static + (plain - static) * int(name[:-1]) // 100
                self.add(f"ours at {name}", functools.partial(self.planned, session, budget))
            elif name == "least":
                self.add("ours at the least", lambda: self.planned(session, session.minimum().minimum_bytes))
            elif (peer := self.ways[0] if name == "plain" else self.add(name, self.peer(name))) is not None:
                self.add(f"ours at {name}", functools.partial(self.planned, session, peer.allocated))

    def peer(self, name: str) -> Callable[[], Way]:
        """How a way that is not ours is made."""
        kind, _, budget = name.partition(" ")
        if kind == "compile":
            return lambda: self.compiled(float(budget or 1))
        return lambda: self.checkpointed(**({"context_fn": selective.contexts} if kind == "selective" else {}))

    def twin(self) -> nn.Module:
        """A copy of the structure over the same parameters and buffers."""
        shared = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        return copy.deepcopy(self.model, dict(shared))

    def checkpointed(self, **options: Any) -> Way:
        twin = self.twin()
        names = tuple(name for name, module in twin.named_modules() if type(module).__name__ == self.case.block)
        checkpoint_each(twin, Blocks(self.case.block, names, ()), **options)
        return self.way(twin, note=f"{len(names)} {self.case.block}")

    def compiled(self, budget: float) -> Way:
        from torch._functorch import config

        twin = self.twin()
        way = self.way(torch.compile(twin))  # type: ignore[arg-type]
        with config.patch(activation_memory_budget=budget):
            step(way.subject.module, self.sample)
        return way

    def planned(self, session: Session, budget: int) -> Way:
        with self.mode():
            plan = session.plan(budget)
        return self.way(plan.module, plan=plan, note=f"recompute {plan.overhead:.2%}")

    def time(self, rounds: int) -> list[list[float]]:
        """Milliseconds of each way's steps, taking turns."""
        taken = interleaved_seconds([way.subject for way in self.ways], self.sample, WARM_UP + rounds, now)
        return [[1000 * seconds for seconds in times[WARM_UP:]] for times in taken]

    def table(self, taken: list[list[float]]) -> Iterator[tuple[str, bool]]:
        """The lines, and whether they hold."""
        plain = statistics.median(taken[0])
        for way, times in zip(self.ways, taken, strict=True):
            cells, holds = [self.name, way.name], True
            for measured, predicted in (
                (way.allocated, way.plan and way.plan.peak_bytes), (way.reserved, way.plan and way.plan.reserved_bytes)
            ):  # fmt: skip
                off = (predicted or measured) / measured - 1
                holds = holds and abs(off) <= 0.01
                cells.append(f"{measured / MIB:.1f}" + (f" ({off:+.2%})" if way.plan else ""))
            if way.plan is not None:
                holds = holds and way.allocated <= (way.plan.budget_bytes or way.allocated)
            took = statistics.median(times)
            cells += [f"{took:.1f}", f"{took / plain:.3f}", way.note, "yes" if holds else "NO"]
            yield f"| {' | '.join(cells)} |", holds


def work(name: str, options: argparse.Namespace, ready: Any, turn: Any, failed: Any) -> None:
    """Prepare, wait for the other models, then be timed alone."""
    try:
        with patient_dynamo():
            bench = Bench(name, options.batch, options.seconds)
            bench.prepare(options.ways.split(","), time_limit=options.time_limit, cost=options.cost)
    finally:
        empty_cache(CUDA)
        ready.wait()
    with turn, patient_dynamo():
        for text, holds in bench.table(bench.time(options.rounds)):
            print(text, flush=True)
            failed.value += not holds
        print(*bench.failures, sep="\n", flush=True)
        empty_cache(CUDA)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of each solve")
    parser.add_argument("--cost", default="roofline", help="what ours are planned by, as in auto_checkpoint")
    parser.add_argument("--seconds", type=float, default=600.0, help="no further way of a model is begun after them")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ready, turn, failed = spawn.Barrier(len(options.names)), spawn.Lock(), spawn.Value("i", 0)
    print("| model | way | allocated MiB (predicted) | reserved MiB (predicted) | ms | of plain | notes | holds |")
    print(f"|{'---|' * 8}", flush=True)
    running = [spawn.Process(target=work, args=(name, options, ready, turn, failed)) for name in options.names]
    for process in running:
        process.start()
    for process in running:
        process.join()
    return int(failed.value > 0 or any(process.exitcode for process in running))


if __name__ == "__main__":
    raise SystemExit(main())
