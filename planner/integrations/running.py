"""The step of a compiled model that is running: its calls in order, and what they hold.

A step calls graphs 1..n forward and then n..1 backward. With H what a graph holds between its halves (saved tensors
and outputs), F and B the highest points of its halves, A(k) what the backwards before that of k leave (gradients of
parameters and of what graphs before k made, and outputs) and S all parameters and inputs, the step's peak is the
largest of

    S + H(1) + ... + H(k-1) + F(k)    and    S + H(1) + ... + H(k-1) + B(k) + A(k).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .calls import Call, gradient_bytes, gradients_of, held, node_of, storages_of, tensors_of
from .partition import Figures
from .program import Program

LONGEST_STEP = 10_000  # calls without a backward between them are not a step


class RunningStep:
    """The calls of a step, as they come.

    Attributes:
        leaves: parameters, their gradients and inputs, with their bytes.
        made: what graphs of this step made: by which.
        accumulated_bytes: the most gradients that a step began with.
    """

    def __init__(self) -> None:
        self.sequence: list[Call] = []
        self.leaves: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.backward_ran = False
        self.accumulated_bytes = 0

    def begin(self) -> None:
        """Forget the last step."""
        self.sequence, self.leaves, self.made, self.backward_ran = [], {}, {}, False

    def see(self, args: Sequence[Any]) -> None:
        """Parameters, their gradients and inputs, once each; what an earlier graph made is counted there."""
        held = [*storages_of(args), *storages_of(gradients_of(args))]
        self.leaves.update((p, size) for p, size in held if p not in self.made)
        self.accumulated_bytes = max(self.accumulated_bytes, gradient_bytes(args))
        self.look()

    def note(self, program: Program, args: Sequence[Any], result: Any) -> None:
        """A call that returned; beyond `LONGEST_STEP`, and of what is not predicted, only that it made its result."""
        if program.predicted is not None and len(self.sequence) < LONGEST_STEP:
            passed = {p: size for p, size in storages_of(args) if p in self.made}
            given = [t for t in tensors_of(args) if t.requires_grad]
            differentiable = frozenset(p for p, _ in storages_of(given) if p in passed)
            self.sequence.append(Call(program, passed, differentiable, program.returned, node_of(result)))
            self.made.update((p, len(self.sequence) - 1) for p, _ in storages_of(result) if p not in self.made)
        else:
            self.made.update((p, -1) for p, _ in storages_of(result))

    def look(self) -> None:
        """Notice which calls' backwards nobody can run any more."""
        for call in self.sequence:
            call.look()

    def figures(self, of: Callable[[Program], Figures]) -> list[Figures]:
        """What each call of the step holds, by what its program holds in a step with a backward."""
        return [call.figures(of(call.program)) for call in self.sequence]

    def peak(self, figures: Sequence[Figures]) -> int:
        """The step's peak (see above)."""
        return sum(self.leaves.values()) + max(self.highest(figures), default=0)

    def highest(self, figures: Sequence[Figures]) -> list[int]:
        """The highest point while either half of each graph runs, above parameters and inputs."""
        held = self.held_before(figures)
        return [held[k] + max(f.forward, f.backward + self.left(figures, k)) for k, f in enumerate(figures)]

    def held_before(self, figures: Sequence[Figures]) -> list[int]:
        """What each graph finds: what those before it hold, and what they passed on and do not count themselves."""
        passed = {p: size for call in self.sequence for p, size in call.passed.items()}
        on = [0] * len(figures)
        for p, size in passed.items():
            maker = self.made[p]
            if maker >= 0 and not self.sequence[maker].program.keeps_outputs:
                on[maker] += size
        return [held(figures[:k]) + sum(on[:k]) for k in range(len(figures))]

    def left(self, figures: Sequence[Figures], k: int) -> int:
        """What the backwards of the graphs after the k-th leave: gradients of what it made itself are its own."""
        later = [call.passed for call in self.sequence[k + 1 :]]
        kept = sum(f.gradients + f.outputs for f in figures[k + 1 :]) - sum(sum(p.values()) for p in later)
        waiting = {p: size for passed in later for p, size in passed.items() if self.made[p] < k}
        return max(0, kept) + sum(waiting.values())

    def handed_back(self, k: int) -> int:
        """Gradients of what the k-th call made, which later graphs make: its own Problem counts them, too."""
        later = {p: call.passed[p] for call in self.sequence[k + 1 :] for p in call.differentiable}
        return sum(size for p, size in later.items() if self.made[p] == k)
