"""What ranks say to each other while they plan: JSON between the first rank of a group and each other one.

Everybody talks to the first rank alone, so that it is known by number who cannot be reached, and everybody is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from passes.exclusive import interruptible
from passes.printable import brief, shown
from planner.errors import RankError
from solvers.errors import PlannerError

_OWN_GROUPS: dict[Any, Any] = {}
T = TypeVar("T")
Message = dict[str, Any]
FAILED = "failed"


class Ranks:
    """The ranks of a process group, which plan together.

    Attributes:
        group: their process group, of a backend that can wait for the CPU of another rank (gloo).
        rank: this process's number in it; 0 decides.
        size: how many they are.
    """

    def __init__(self, group: Any) -> None:
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise PlannerError(
                f"group={shown(group)} is no process group: pass one of torch.distributed, such as "
                "dist.group.WORLD, or None to plan in this process alone."
            )
        self.group = _gloo(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def together(self, work: Callable[[], tuple[T, Message]]) -> tuple[T, list[Message]]:
        """Do `work` on every rank; its result here, and what it has to say on each rank, in their order.

        Raises:
            RankError: another rank failed or cannot be reached. An error of this rank's own is raised as it is.
        """
        try:
            with interruptible():
                result, message = work()
        except BaseException as error:  # Ctrl-C, too
            self._tell({FAILED: f"{type(error).__name__}: {error}".rstrip(": ")})
            raise
        said = self._tell(message)
        for rank, words in enumerate(said):
            if FAILED in words:
                raise RankError(f"rank {rank} of {self.size} does not plan with this one: {words[FAILED]}", rank=rank)
        return result, said

    def _tell(self, message: Message) -> list[Message]:
        """Say something to all ranks and hear them; one that failed does not wait to hear."""
        if self.rank:
            return self._report(message)
        said = [message, *(self._heard(rank) for rank in range(1, self.size))]
        for rank in (r for r in range(1, self.size) if FAILED not in said[r]):
            try:
                self._send(said, rank)
            except RuntimeError as error:
                said[rank] = _gone(error)
        return said

    def _heard(self, rank: int) -> Message:
        try:
            words: Message = self._receive(rank)
        except RuntimeError as error:
            return _gone(error)
        return words

    def _report(self, message: Message) -> list[Message]:
        try:
            self._send(message, 0)
            said: list[Message] = [message] if FAILED in message else self._receive(0)
        except RuntimeError as error:
            return [_gone(error)]
        return said

    def _send(self, message: Any, rank: int) -> None:
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        dist.send(torch.tensor([text.numel()]), group=self.group, group_dst=rank)
        dist.send(text, group=self.group, group_dst=rank)

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group=self.group, group_src=rank)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, group=self.group, group_src=rank)
        return json.loads(text.numpy().tobytes())


def _gone(error: RuntimeError) -> Message:
    clause = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]  # between a place in gloo's source and advice
    return {FAILED: f"it ended, or cannot be reached ({brief(clause, 200)})"}


def _gloo(group: Any) -> Any:
    """The group itself where gloo serves the CPU in it, else one of gloo's for the same ranks."""
    try:
        backend = group._get_backend(torch.device("cpu")).name()
    except RuntimeError:
        backend = ""
    if backend == "gloo":
        return group
    if group not in _OWN_GROUPS:
        members = dist.get_process_group_ranks(group)
        _OWN_GROUPS[group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return _OWN_GROUPS[group]
