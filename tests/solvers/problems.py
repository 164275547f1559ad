"""Problems solved by hand: the least added cost at several budgets, and why. Every solver runs on every one.

A problem is written one op per line, the backward below `--`:

    tensor:bytes ... = op(read, ...) cost N workspace N once optional replay tensor

Where it is not given, cost is 1 in the forward, 0 in the backward and for an optional op. `once` forbids recomputing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from solvers.problem import Op, Problem, Tensor

LINE = re.compile(r"(?P<writes>[\w: ]*?)\s*=\s*(?P<op>\w+)\((?P<reads>[\w, ]*)\)\s*(?P<options>.*)")


@dataclass(frozen=True)
class Solved:
    """A problem and its optimum per budget; None where nothing fits.

    `in_forward` says that reaching the optimum takes a recompute before the backward has begun.
    """

    name: str
    problem: Problem
    optimum: dict[int, int | None]
    in_forward: bool = False


def parse(text: str, outputs: str = "", static_bytes: int = 0) -> Problem:
    ops: list[Op] = []
    tensors: list[Tensor] = []
    index: dict[str, int] = {}
    num_forward = None
    for line in filter(None, map(str.strip, text.splitlines())):
        if line == "--":
            num_forward = len(ops)
            continue
        match = LINE.fullmatch(line)
        assert match, line
        writes = []
        for item in match["writes"].split():
            name, size = item.split(":")
            index[name] = len(tensors)
            writes.append(len(tensors))
            tensors.append(Tensor(name, int(size)))
        reads = tuple(index[name.strip()] for name in match["reads"].split(",") if name.strip())
        words = match["options"].split()
        after = dict(pairwise(words))
        cost = int(after.get("cost", num_forward is None and "optional" not in words))
        ops.append(
            Op(
                match["op"], reads, tuple(writes), cost,
                workspace=int(after.get("workspace", 0)),
                recomputable=num_forward is None and not {"once", "optional"} & set(words),
                replay_inputs=(index[after["replay"]],) if "replay" in after else (),
                optional="optional" in words,
            )
        )  # fmt: skip
    assert num_forward is not None, "no line '--' between forward and backward"
    return Problem(
        tuple(ops), tuple(tensors), num_forward, tuple(index[name] for name in outputs.split()), static_bytes
    )


SOLVED = (
    # d2 reads b and c and d1 reads a and b, so plainly d2 sees a+b+c+g2 = 13. The only tensor of the 13 that d2 does
    # not read is a: drop it after f1 and pay f0 again. Then d2 sees 9 and d1 sees a+b+g2+g1 = 10, which it always does.
    Solved(
        "chain",
        parse(
            """
            a:4 = f0() cost 5
            b:4 = f1(a) cost 3
            c:4 = f2(b) cost 2
            --
            g2:1 = d2(b, c)
            g1:1 = d1(a, b, g2)
            g0:1 = d0(a, g1)
            """,
            outputs="g0",
        ),
        {14: 0, 13: 0, 12: 5, 10: 5, 9: None},
    ),
    # The same chain under 100 static bytes, and f0 may not run again: a stays, so 113 or nothing.
    Solved(
        "chain with an op that must run once",
        parse(
            """
            a:4 = f0() cost 5 once
            b:4 = f1(a) cost 3
            c:4 = f2(b) cost 2
            --
            g2:1 = d2(b, c)
            g1:1 = d1(a, b, g2)
            g0:1 = d0(a, g1)
            """,
            outputs="g0",
            static_bytes=100,
        ),
        {113: 0, 112: None},
    ),
    # The same chain with f0 free of charge: the recompute at 12 costs nothing.
    Solved(
        "chain with a zero-cost op",
        parse(
            """
            a:4 = f0() cost 0
            b:4 = f1(a) cost 3
            c:4 = f2(b) cost 2
            --
            g2:1 = d2(b, c)
            g1:1 = d1(a, b, g2)
            g0:1 = d0(a, g1)
            """,
            outputs="g0",
        ),
        {13: 0, 12: 0, 10: 0, 9: None},
    ),
    # d3 sees t+g = 5 beside what is kept of a+b+c = 12, while f3 sees a+b+c+t = 13 in any case. 14 to 16: free 1 to
    # 3 bytes, b is the cheapest that does. 13: free 4, by b and c for 2+3 or by a for 6.
    Solved(
        "knapsack",
        parse(
            """
            a:6 = f0() cost 6
            b:3 = f1() cost 2
            c:3 = f2() cost 3
            t:1 = f3(a, b, c)
            --
            g:4 = d3(t)
            ha:0 = d2(a)
            hb:0 = d1(b)
            hc:0 = d0(c)
            """,
            outputs="ha hb hc",
        ),
        {17: 0, 16: 2, 14: 2, 13: 5, 12: None},
    ),
    # d3 sees 6 beside what is kept. 14: without a. 10: with c alone, a and b made again after c was used (1+2). Below,
    # all is made again, and c cannot be made beside a (12 bytes), so a is made twice: 1+2+4+1, at b+c = 8.
    # b is read twice by f2, which changes nothing.
    Solved(
        "recompute of a recompute",
        parse(
            """
            a:4 = f0() cost 1
            b:4 = f1(a) cost 2
            c:4 = f2(b, b) cost 4
            t:0 = f3(c) cost 9
            --
            g:6 = d3()
            h2:0 = d2(c)
            h1:0 = d1(b)
            h0:0 = d0(a)
            """,
            outputs="h2 h1 h0",
        ),
        {18: 0, 17: 1, 14: 1, 13: 3, 10: 3, 9: 8, 8: 8, 7: None},
    ),
    # a is read before, between and after two moments of 6 bytes: below 10 it is made again twice.
    Solved(
        "recomputed twice",
        parse(
            """
            a:4 = f0()
            t:0 = f1(a)
            --
            g1:6 = d1()
            h1:0 = e1(a)
            g2:6 = d2()
            h2:0 = e2(a)
            """,
            outputs="h1 h2",
        ),
        {10: 0, 9: 2, 6: 2, 5: None},
    ),
    # One run makes p and q. Plainly d1 sees p+q+r+g = 16. Dropping one of them only: making it again allocates both
    # beside the kept one, 12. Dropping both costs the same run and gives 8: what the run itself needs.
    Solved(
        "two outputs",
        parse(
            """
            p:4 q:4 = f0() cost 3
            r:2 = f1(p)
            --
            g:6 = d1(r)
            h:0 = d2(p)
            k:0 = d3(q)
            """,
            outputs="h k",
        ),
        {16: 0, 15: 3, 12: 3, 8: 3, 7: None},
    ),
    # Making m again needs the generator's state from before: 1 byte, held through f1 (7) and d1 (s+t+g = 7), where m
    # alone would make 10. A plan without recompute does not pay for s.
    Solved(
        "dropout",
        parse(
            """
            s:1 = save() optional
            m:4 = drop() cost 2 replay s
            t:2 = f1(m)
            --
            g:4 = d1(t)
            h:0 = d0(m)
            """,
            outputs="h",
        ),
        {10: 0, 9: 2, 7: 2, 6: None},
    ),
    # What the forward returned is the caller's: y stays though f1 could make it again. a is dropped for 1; f1 sees 10.
    Solved(
        "forward output",
        parse(
            """
            a:4 = f0()
            y:6 = f1(a) cost 5
            --
            g:3 = d1(y)
            h:0 = d0(a)
            """,
            outputs="y h",
        ),
        {13: 0, 12: 1, 10: 1, 9: None},
    ),
    # d1 sees a+t+g = 11. Dropped, a is made again after g is gone, with f0's workspace: 9, as in the forward.
    Solved(
        "workspace",
        parse(
            """
            a:4 = f0() cost 2 workspace 5
            t:1 = f1(a)
            --
            g:6 = d1(t)
            h:0 = d0(a)
            """,
            outputs="h",
        ),
        {11: 0, 10: 2, 9: 2, 8: None},
    ),
    # Here g is read with a, so making a again sees g+a+5 = 15: a recompute only makes it worse.
    Solved(
        "workspace in the way",
        parse(
            """
            a:4 = f0() cost 2 workspace 5
            t:1 = f1(a)
            --
            g:6 = d1(t)
            h:0 = d0(a, g)
            """,
            outputs="h",
        ),
        {11: 0, 10: None},
    ),
    # Nothing is connected. d0 sees g+x+y = 13. f1 sees x+y = 9 while x is kept, and so does d1 while y is kept: 9 to
    # 12 drop the cheaper one, y. Below, both go: 3+2, at y = 5.
    Solved(
        "disconnected",
        parse(
            """
            x:4 = f0() cost 3
            y:5 = f1() cost 2
            --
            g:4 = d0()
            h:0 = d1(x)
            k:0 = d2(y)
            """,
            outputs="h k",
        ),
        {13: 0, 12: 2, 9: 2, 8: 5, 5: 5, 4: None},
    ),
    # The peak is in the forward: f2 sees a+b+c+6 = 12. Dropped before it, a is made again for f3, still in the forward:
    # f2 then sees 8.
    Solved(
        "peak in the forward",
        parse(
            """
            a:4 = f0() cost 2
            b:1 = f1(a)
            c:1 = f2(b) workspace 6
            e:1 = f3(a, c)
            --
            g:1 = d3(e)
            """,
            outputs="g",
        ),
        {12: 0, 11: 2, 8: 2, 7: None},
        in_forward=True,
    ),
    # start and b1 both see a+b+t = 14. Without a they see 10, and f1's own a+b = 12 is then the peak; a is made again
    # for b0 once b and t are gone.
    Solved(
        "two moments at the peak",
        parse(
            """
            a:4 = f0() cost 3
            b:8 = f1(a) cost 5
            --
            t:2 = start()
            g1:0 = b1(b, t)
            g0:4 = b0(a, g1)
            """,
            outputs="g1",
        ),
        {14: 0, 13: 3, 12: 3, 11: None},
    ),
    # Zero bytes everywhere but in the parameters: the plain step fits exactly, one byte less never does.
    Solved(
        "weightless",
        parse(
            """
            a:0 = f0()
            b:0 = f1(a)
            --
            g:0 = d1(a, b)
            """,
            outputs="g",
            static_bytes=7,
        ),
        {7: 0, 6: None},
    ),
    # A step whose backward reads nothing of the forward, whose last forward op writes nothing.
    Solved(
        "nothing to save",
        parse(
            """
            a:4 = f0()
            = f1(a)
            --
            t:2 = start()
            g:2 = d1(t)
            """,
            outputs="t g",
        ),
        {4: 0, 3: None},
    ),
)
