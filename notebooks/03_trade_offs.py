# %% [markdown]
# # Trade-offs: what a megabyte costs
#
# `frontier` captures a step once and plans it for a range of budgets. Here the frontier of each solver is set beside
# `torch.utils.checkpoint` around every block, the usual way to save memory, on a small language model and on a U-shaped
# network. Both are CPU-sized; `tests/bench/peers` compares more methods on larger models.
#
# One unit for all: FLOPs by torch's own counter, in percent of the plain step's, and the measured or predicted peak of
# the step in MiB, parameters and gradients included.

# %%
import time
from dataclasses import replace

import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from passes.memory import measure_peak
from planner.command.demo import LanguageModel, make_batch
from planner.frontier import frontier_of
from planner.session import open_session

MIB = 2**20

# %% [markdown]
# ## The two models
#
# Each gets a switch that puts `torch.utils.checkpoint` around its blocks.


# %%
class GPT(LanguageModel):
    """The language model of the demo; `checkpointed` wraps each transformer block."""

    checkpointed = False

    def forward(self, tokens, targets):
        length = tokens.shape[1]
        x = self.dropout(self.tokens(tokens) + self.positions.weight[:length])
        for block in self.blocks:
            mask = self.mask[:length, :length]
            x = checkpoint(block, x, mask, use_reentrant=False) if self.checkpointed else block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class UNet(nn.Module):
    """Four levels down and up with skip connections; `checkpointed` wraps the block of each level."""

    checkpointed = False

    def __init__(self, channels=(16, 32, 64, 128)):
        super().__init__()
        self.down = nn.ModuleList(block(a, b) for a, b in zip((3, *channels), channels))
        self.up = nn.ModuleList(block(a + b, b) for a, b in zip(channels[:0:-1], channels[-2::-1]))
        self.head = nn.Conv2d(channels[0], 4, 1)

    def forward(self, image, target):
        skips, x = [], image
        for level in self.down:
            x = self.run(level, F.avg_pool2d(x, 2) if skips else x)
            skips.append(x)
        for level, skip in zip(self.up, skips[-2::-1]):
            x = self.run(level, torch.cat([skip, F.interpolate(x, scale_factor=2)], 1))
        return F.cross_entropy(self.head(x), target)

    def run(self, level, x):
        return checkpoint(level, x, use_reentrant=False) if self.checkpointed else level(x)


def block(before, after):
    layers = []
    for size in (before, after):
        layers += [nn.Conv2d(size, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU()]
    return nn.Sequential(*layers)


torch.manual_seed(0)
models = {
    "language model": (GPT(layers=4, width=128, length=128), make_batch(0, batch=8)),
    "U-shaped network": (UNet(), (torch.randn(2, 3, 64, 64), torch.randint(0, 4, (2, 64, 64)))),
}

# %% [markdown]
# ## Measuring a step
#
# The peak is replayed from the allocator's own events, so it is exact; FLOPs are counted while the step runs. Times are
# the fastest of several steps taken in turns, and still mean little on a busy machine or for steps this small.


# %%
def step(model, batch):
    torch.manual_seed(0)
    model(*batch).backward()
    model.zero_grad(set_to_none=True)


def measure(run, static_bytes):
    run()
    with FlopCounterMode(display=False) as counter:
        run()
    return {"peak MiB": (static_bytes + measure_peak(run)) / MIB, "FLOPs": counter.get_total_flops()}


def fastest(runs, rounds=9):
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in seconds.items()}


def checkpointed_step(model, batch):
    model.checkpointed = True
    step(model, batch)
    model.checkpointed = False


# %% [markdown]
# ## The frontiers
#
# `cost="flops"` asks for plans that add the fewest FLOPs. `figure = found.plot()` draws the best plans, the proved lower
# bound under them, the proved floor and the plain step; the other solvers and `torch.utils.checkpoint` are added to the
# same axes.


# %%
def compare(name, points=8):
    model, batch = models[name]
    session = open_session(model, batch, cost="flops", time_limit=3, progress=False)
    curves = {}
    for solver in ("auto", "greedy", "chen"):
        options = replace(session.prepared.options, solver=solver)
        by_solver = replace(session, prepared=replace(session.prepared, options=options))
        curves[solver] = frontier_of(by_solver, points)
    static_bytes = session.problem.static_bytes
    table = pd.DataFrame({
        "plain (eager)": measure(lambda: step(model, batch), static_bytes),
        "checkpoint per block": measure(lambda: checkpointed_step(model, batch), static_bytes),
    }).T
    table["added FLOPs, %"] = 100 * (table["FLOPs"] / table["FLOPs"].iloc[0] - 1)
    return session, curves, table


def draw(name, curves, table):
    figure = curves["auto"].plot()
    axes = figure.axes[0]
    for solver, colour, marker in (("greedy", "#f09a36", "s"), ("chen", "#9a7fd1", "^")):
        found = curves[solver].points
        axes.plot([p.budget_bytes / MIB for p in found], [100 * p.overhead for p in found], marker=marker, ms=4, lw=1,
                  color=colour, label=f"{solver} alone")
    theirs = table.loc["checkpoint per block"]
    axes.plot([theirs["peak MiB"]], [theirs["added FLOPs, %"]], "X", ms=9, color="#101418",
              label="torch.utils.checkpoint per block (measured)")
    axes.autoscale(axis="y")
    axes.set_ylim(bottom=0)
    axes.set_title(name, loc="left", fontsize=10)
    axes.legend(framealpha=1, edgecolor="none", fontsize=8)
    return figure


session, curves, table = compare("language model")
draw("language model", curves, table)

# %%
curves["auto"].table().round(4)

# %% [markdown]
# ## At the peak of `torch.utils.checkpoint`
#
# What do the FLOPs of checkpointing each block buy? We plan for exactly the peak that it reaches, once for FLOPs and
# once for the roofline cost (bytes moved count too), which is the better guess at time.


# %%
def at_their_peak(name, table):
    model, batch = models[name]
    runs = {"plain (eager)": lambda: step(model, batch), "checkpoint per block": lambda: checkpointed_step(model, batch)}
    rows = table.copy()
    for cost in ("flops", "roofline"):
        found = open_session(model, batch, cost=cost, time_limit=5, progress=False)
        plan = found.plan(int(table.loc["checkpoint per block", "peak MiB"] * MIB))
        runs[f"plan, cost={cost}"] = lambda module=plan.module: step(module, batch)
        rows.loc[f"plan, cost={cost}"] = measure(runs[f"plan, cost={cost}"], plan.static_bytes)
    rows["added FLOPs, %"] = 100 * (rows["FLOPs"] / rows["FLOPs"].iloc[0] - 1)
    seconds = fastest(runs)
    rows["time, of plain"] = [seconds[name] / seconds["plain (eager)"] for name in rows.index]
    return rows.drop(columns="FLOPs").round(3)


at_their_peak("language model", table)

# %% [markdown]
# ## The U-shaped network
#
# A U keeps the outputs of its way down until the way up has read them, so there is no chain to cut into equal parts:
# Chen's method has little to offer. The planner sees the graph as it is.

# %%
session, curves, table = compare("U-shaped network")
draw("U-shaped network", curves, table)

# %%
at_their_peak("U-shaped network", table)

# %% [markdown]
# ## Reading the curves
#
# * The first megabytes are almost free: activations that elementwise ops make again cost no FLOPs to speak of.
# * Towards the smallest budget the price rises steeply; `minimum_budget` tells where the wall is, and the floor how far
#   it could be moved at all.
# * Where the curve lies on its bound, nobody can do better with the required ops in this order; where it does not, the
#   gap is shown, and more `time_limit` may close it.
