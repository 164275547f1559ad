"""Running a function in two processes that talk through gloo, and what all its cases share."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "planner"])


class Failed(AssertionError):
    """A rank raised, or ended without an answer."""


def run_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2, seconds: float = 120.0) -> list[Any]:
    """What `function(rank, *args)` returned on each rank.

    Raises:
        Failed: a rank raised, was killed, or did not answer in time.
    """
    answers = try_ranks(function, *args, ranks=ranks, seconds=seconds)
    for rank, answer in enumerate(answers):
        if isinstance(answer, Failed):
            raise Failed(f"rank {rank}: {answer}")
    return answers


def try_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2, seconds: float = 120.0) -> list[Any]:
    """As `run_ranks`, with a `Failed` in the place of an answer that did not come."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            here, there = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_child, args=(there, function, rank, ranks, f"{folder}/store", args))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _answers(pipes, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection], seconds: float) -> list[Any]:
    answers: list[Any] = [Failed(f"no answer within {seconds:.0f} s") for _ in pipes]
    waiting = list(pipes)
    while waiting:
        ready = wait(waiting, seconds)
        if not ready:
            break
        for pipe in ready:
            waiting.remove(pipe)  # type: ignore[arg-type]
            try:
                answers[pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type, union-attr]
            except EOFError:
                answers[pipes.index(pipe)] = Failed("ended without an answer")  # type: ignore[arg-type]
    return answers


def _child(pipe: Connection, function: Callable[..., Any], rank: int, ranks: int, store: str, args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=ranks)
    try:
        pipe.send(function(rank, *args))
    except Exception:  # noqa: BLE001
        pipe.send(Failed(traceback.format_exc()))
    finally:
        pipe.close()
        dist.destroy_process_group()
