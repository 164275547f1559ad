# %% [markdown]
# # How it works: a six-op model from graph to proof
#
# A plan is made in seven small steps, each a function from one plain value to the next:
#
# | step | from | to |
# |---|---|---|
# | capture | model, sample | one graph of forward *and* backward, in ATen ops |
# | alias | graph | which values share a storage |
# | profile | graph | bytes, FLOPs, workspace of each op |
# | lower | all of these | a `Problem` in whole numbers, without torch |
# | solve | `Problem`, budget | a `Schedule`: what runs when, what is freed when |
# | rewrite | graph, `Schedule` | a forward and a backward `GraphModule` |
# | verify | both | a proof that they compute the traced values, or an error |
#
# We walk through them with a model of six ops, small enough to read every line of what happens.

# %%
import torch
from torch import nn
from torch.nn import functional as F


class Six(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 1024)

    def forward(self, x):
        hidden = F.dropout(F.gelu(self.first(x)), 0.1)  # addmm, gelu, native_dropout
        return F.gelu(self.second(hidden)).mean()       # addmm, gelu, mean


torch.manual_seed(0)
model, x = Six(), torch.randn(512, 64)

# %% [markdown]
# ## 1. Capture: one graph of the whole step
#
# What must be kept depends on what the backward reads, so forward and backward have to be seen together.
# `torch.export` and AOT autograd trace them into one *joint graph*: first the parameters and inputs (`primals`), then the
# forward ops, then from the loss's gradient (`tangents_1`) one gradient per parameter. It is traced with fake tensors:
# nothing is computed, nothing of the model's size is allocated.

# %%
from passes.trace.arguments import bind_sample
from passes.trace.capture import capture

traced = capture(model, bind_sample(model, x))
print(traced.graph_module.print_readable(print_output=False, colored=False))

# %% [markdown]
# ## 2. Alias: memory is held by storages, not by values
#
# Half of these nodes are views (`t`, `detach`, `expand`, `view`): they cost nothing, but they keep alive what they view.
# So liveness is counted by storage. Note that `native_dropout` makes two: its result and a mask of one byte per element.

# %%
import pandas as pd

from passes.alias import alias

pd.set_option("display.max_colwidth", 60)
aliases = alias(traced.graph_module.graph)
values = [(node, s) for node in traced.graph_module.graph.nodes for s in aliases.storages(node)]
owners = {}
for node, storage in values:
    owners.setdefault((storage.node.name, storage.index), (storage, []))[1].append(node.name)
pd.DataFrame([
    {"storage": name if storage.index == 0 else f"{name}[{storage.index}]", "bytes": storage.bytes,
     "resident": "always" if storage.static else "from its op to its last reader", "values in it": ", ".join(nodes)}
    for (name, _), (storage, nodes) in owners.items()
])

# %% [markdown]
# ## 3. Profile and lower: a problem in whole numbers
#
# Each distinct op is run once on the device: what the allocator sees above the inputs and outputs is its *workspace*.
# Its cost is what recomputing it takes; here picoseconds by the device's rates for each class of op.
# Then torch is left behind: a `Problem` is ops in their order with the tensors that they read and write, in bytes.
# Three kinds of ops are not torch's: `native_dropout_rng` (the generator's state to replay the dropout under, taken only
# if it is to run again), `return_outputs` (what is handed over lives until the forward ends) and `tangents`.

# %%
from planner.session import open_session

session = open_session(model, x, progress=False)  # capture, alias, profile and lower in one call
problem = session.problem
name = [t.name for t in problem.tensors]
pd.DataFrame([
    {"op": op.name, "reads": ", ".join(name[t] for t in op.inputs), "writes": ", ".join(name[t] for t in op.outputs),
     "bytes": sum(problem.tensors[t].bytes for t in op.outputs), "workspace": op.workspace, "cost": op.cost,
     "may run again": op.recomputable, "half": "forward" if i < problem.num_forward else "backward"}
    for i, op in enumerate(problem.ops)
])

# %% [markdown]
# ## 4. Simulate: the only referee
#
# A `Schedule` is a list of `compute` and `free` steps. `simulate` replays it and counts every byte at every moment. It
# is the only judge of a schedule: whatever a solver claims is counted again here. This is the plain step, where every
# op runs once (an op that may write into a dying input's memory does so; nothing is allocated for it then):

# %%
from solvers.schedule import plain_order, with_frees
from solvers.simulate import simulate


def show(schedule):
    result = simulate(problem, schedule)
    rows, seen = [], set()
    for step, during, after in zip(schedule, result.moment_bytes, result.resident_bytes):
        if step.kind == "compute":
            op = problem.ops[step.index]
            rows.append({"runs": op.name + (" (again)" if step.index in seen else ""), "bytes during": during, "freed": []})
            seen.add(step.index)
        else:
            rows[-1]["freed"].append(name[step.index])
        rows[-1]["bytes after"] = after
    print(f"peak {result.peak_bytes:,} bytes, added cost {result.added_cost / problem.step_cost:.2%} of the step")
    return pd.DataFrame([{**row, "freed": ", ".join(row["freed"])} for row in rows])


plain = with_frees(problem, plain_order(problem))
show(plain)

# %% [markdown]
# ## 5. Solve: three ways to spend less memory
#
# The smallest peak that works is searched for, and a floor is proved below it. Between the two peaks lies what can be
# bought with recompute.

# %%
minimum = session.minimum()
print(f"plain peak    {session.plain_peak_bytes:,} bytes")
print(f"smallest peak {minimum.minimum_bytes:,} bytes found, none below {minimum.floor_bytes:,} can work")
budget = minimum.minimum_bytes
print(f"our budget: {budget:,} bytes")

# %% [markdown]
# *Chen* keeps every sqrt(n)-th boundary and recomputes between; *greedy* drops, one at a time, what frees the most bytes
# for its cost; the *integer program* decides everything at once and proves a lower bound with it. The bound holds for
# every schedule, so "optimal" means that nobody can do better under this order of the required ops.

# %%
from collections import Counter

from solvers.errors import BudgetError
from solvers.schedule import computes

rows = []
for solver in ("chen", "greedy", "ilp"):
    for share in (1.0, 0.75, 0.5, 0.25, 0.0):
        size = minimum.minimum_bytes + int(share * (session.plain_peak_bytes - minimum.minimum_bytes))
        try:
            found = session.solve(size, solver=solver)
        except BudgetError as error:
            rows.append({"solver": solver, "budget": f"{size:,}", "status": f"its smallest is {error.minimum_bytes:,} bytes"})
            continue
        runs = Counter(computes(found.schedule))
        again = [problem.ops[i].name for i in sorted(runs) if runs[i] > 1]
        bound = None if found.bound is None else f"{problem.overhead(found.bound):.2%}"
        rows.append({"solver": solver, "budget": f"{size:,}", "peak": f"{found.peak_bytes:,}",
                     "recompute": f"{problem.overhead(found.added_cost):.2%}", "bound": bound,
                     "status": found.status.value, "runs again": ", ".join(again)})
pd.DataFrame(rows).fillna("")

# %% [markdown]
# The plan for our budget, step by step. Compare the frees with those of the plain step: what runs again is freed in the
# forward, right after its last reader there.

# %%
plan = session.plan(budget)
show(plan.schedule)

# %% [markdown]
# ## 6. Rewrite: the schedule as code
#
# The rewrite copies and reorders nodes of the joint graph; an op whose input dies in it may write its result there
# (`gelu_`), as the simulation counted. The forward returns the loss and what it saves. Ops are arguments with defaults, so
# that a call looks nothing up.

# %%
print(plan.rewritten.forward.code)

# %% [markdown]
# In the backward, a random op runs again under the generator's state from before its first run (`run_with_rng_state`), so
# that it draws the same numbers and leaves the generator where it was. The backward yields each gradient as soon as nothing
# reads it any more (`handed_over`), so that autograd takes it while the rest is computed.

# %%
print(plan.rewritten.backward.code)

# %% [markdown]
# ## 7. Verify: a proof, not a hope
#
# Since a rewrite only copies and reorders, *value numbering* proves it. A value's number is its op with the numbers of its
# arguments; equal numbers mean equal values. A random op gets a number of its own each time it runs, unless it runs
# under the saved state. If the outputs of the two halves carry the numbers of the traced graph's outputs, they are the
# same values. This runs on every plan before you get it, in milliseconds.

# %%
from passes.errors import VerificationError
from passes.verify import verify

verify(plan.prepared.traced, plan.rewritten)
print("proved")

# %% [markdown]
# And when a rewrite is wrong? We break copies of it, each in one place.

# %%
import copy
from dataclasses import replace

from passes.run.random import run_with_rng_state


def skip_gelu(graph):
    """Use what goes into the recomputed gelu in the place of its result."""
    node = next(n for n in graph.nodes if n.meta.get("recompute_of") and "aten.gelu" in str(n.target))
    node.replace_all_uses_with(node.args[0])


def draw_anew(graph):
    """Recompute the dropout without the generator's state of its first run."""
    node = next(n for n in graph.nodes if n.target is run_with_rng_state)
    node.target, node.args = node.args[2], node.args[3:]


def swap_gradients(graph):
    """Return the gradients of two parameters in each other's place."""
    first, second, *rest = graph.output_node().args[0]
    graph.output_node().args = ((second, first, *rest),)


for damage in (skip_gelu, draw_anew, swap_gradients):
    broken = copy.deepcopy(plan.rewritten.backward)
    damage(broken.graph)
    try:
        verify(plan.prepared.traced, replace(plan.rewritten, backward=broken))
    except VerificationError as error:
        print(f"{damage.__name__}: refused: {error}\n")

# %% [markdown]
# ## And it runs as simulated
#
# The generated code frees what the schedule frees, so the allocator sees what `simulate` counted.

# %%
from passes.memory import measure_peak

plain_model = copy.deepcopy(model)
torch.manual_seed(1)
plain_model(x).backward()
peak = measure_peak(lambda: (torch.manual_seed(1), plan.module(x).backward()))
print(f"predicted {plan.peak_bytes:,} bytes, measured {plan.static_bytes + peak:,}")
equal = [torch.equal(a.grad, b.grad) for a, b in zip(plain_model.parameters(), model.parameters())]
print(f"gradients equal bit for bit: {all(equal)}")
