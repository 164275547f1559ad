"""What is proved without solving anything: bytes that every schedule of a problem holds.

The floor of the memory counts, while required op s runs, what no schedule can do without:

1. the tensors s reads, the tensors it writes (less an input it may overwrite), and its workspace;
2. outputs of the step that are already written (an output keeps its first copy until the end);
3. tensors whose producer may not run again, written before and still to be read by a required op.

A forward tensor counted by none of these could have been dropped and recomputed, so it is left out.
"""

from __future__ import annotations

from .problem import Problem


def required_bytes(problem: Problem) -> list[int]:
    """For each op, bytes that every schedule holds while it runs, static bytes included; 0 for optional ops."""
    held = _held_across(problem)
    sizes = [t.bytes for t in problem.tensors]
    moments = []
    current = problem.static_bytes
    for s, op in enumerate(problem.ops):
        current += sum(sizes[t] for t in held[0][s])
        own = sum(sizes[t] for t in dict.fromkeys(op.inputs) if not _is_held(problem, t))
        reused = sizes[op.reuse[0]] if op.reuse else 0
        extra = 0 if op.optional else own + op.workspace + sum(sizes[t] for t in op.outputs) - reused
        moments.append(0 if op.optional else current + extra)
        current -= sum(sizes[t] for t in held[1][s])
    return moments


def floor_bytes(problem: Problem) -> int:
    """A peak that no schedule of the problem can go below."""
    return max(required_bytes(problem), default=problem.static_bytes)


def _is_held(problem: Problem, tensor: int) -> bool:
    producer = problem.ops[problem.producer[tensor]]
    return not producer.optional and (tensor in problem.pinned or not producer.recomputable)


def _held_across(problem: Problem) -> tuple[list[list[int]], list[list[int]]]:
    """For each op the held tensors that are resident from it on, and those let go after it."""
    begin: list[list[int]] = [[] for _ in range(len(problem.ops) + 1)]
    end: list[list[int]] = [[] for _ in problem.ops]
    for t in range(len(problem.tensors)):
        if not _is_held(problem, t):
            continue
        if t in problem.pinned:
            begin[problem.producer[t] + 1].append(t)
        elif problem.readers[t]:
            begin[problem.producer[t] + 1].append(t)
            end[problem.readers[t][-1]].append(t)
    return begin, end
