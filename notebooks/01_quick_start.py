# %% [markdown]
# # Quick start: a model that does not fit, made to fit
#
# You have a model, a batch and so many megabytes. `auto_checkpoint` plans the training step under that number: it keeps
# some activations, computes others again, and proves that nothing else changes. Everything below runs on a CPU in less
# than a minute; on a GPU only the devices differ.

# %%
import torch

from planner import BudgetError, Plan, auto_checkpoint
from planner.command.demo import LanguageModel, make_batch

torch.manual_seed(0)
model = LanguageModel(layers=6, width=192, length=128)  # GPT-2's shape in plain torch, dropout 0.1, the loss inside
batch = make_batch(seed=0, batch=16)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, tokens {tuple(batch[0].shape)}")

# %% [markdown]
# ## It does not fit
#
# To see it fail for real, we let this process grow by 200 MiB and no more (a limit of the operating system, Linux), and
# try one step.

# %%
import contextlib
import resource


@contextlib.contextmanager
def at_most(mib):
    """Refuse this process more than `mib` MiB beyond what it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as pages:
        now = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + mib * 2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def train_step(model, batch, seed=0):
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = model(*batch)
    loss.backward()
    return loss.item()


train_step(model, make_batch(seed=1, batch=1))  # one sample fits; it also starts torch's threads
try:
    with at_most(200):
        train_step(model, batch)
except RuntimeError as error:
    print("RuntimeError:", str(error).split(": ", 1)[-1].splitlines()[0])

# %% [markdown]
# ## Plan it
#
# `budget_mb` is the highest point of memory during the whole step, parameters, gradients and inputs included, as
# `torch.cuda.max_memory_allocated` would show it. The plan shows itself: the verdict with a proved lower bound on the
# recompute, memory over the step (the dashed line is the plain step), what is resident at the peak, and the bytes by
# module. Open a module to see its ops.

# %%
plan = auto_checkpoint(model, batch, budget_mb=150, time_limit=10, progress=False)
plan

# %% [markdown]
# ## Train it
#
# `plan.apply(model)` makes your own object run the plan: same class, same methods, same `state_dict`. (`plan.module` is
# the same as a separate `torch.fx.GraphModule`.) Under the same limit that the plain step failed at (the plan asks for
# 150 of the 200 MiB: the C allocator needs room for its gaps):

# %%
plan.apply(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with at_most(200):
    for step in range(6):
        loss = train_step(model, make_batch(seed=step, batch=16), seed=step)
        optimizer.step()
        print(f"step {step}: loss {loss:.4f}")

# %% [markdown]
# ## Nothing else changed
#
# The same step with and without the plan, dropout included: the loss, every gradient and the random generator's state are
# equal bit for bit. And what the plan predicts is what the allocator sees, to the byte. The plain step needs more than
# the plan's "instead of", which is the planner's own step with nothing recomputed: it has one buffer for the cross
# entropy where the plain step has three.

# %%
from passes.memory import measure_peak


def observe(model):
    loss = train_step(model, batch)
    return loss, [p.grad.clone() for p in model.parameters()], torch.get_rng_state()


planned = observe(model)
model.zero_grad(set_to_none=True)
peak = measure_peak(lambda: train_step(model, batch))
plan.remove(model)  # the model is as it was
plain = observe(model)
model.zero_grad(set_to_none=True)
plain_peak = measure_peak(lambda: train_step(model, batch))

print("loss equal:      ", planned[0] == plain[0])
print("gradients equal: ", all(torch.equal(a, b) for a, b in zip(planned[1], plain[1])))
print("generator equal: ", torch.equal(planned[2], plain[2]))
print(f"planned: {(plan.static_bytes + peak) / 2**20:.3f} MiB measured, {plan.peak_bytes / 2**20:.3f} MiB predicted")
print(f"plain:   {(plan.static_bytes + plain_peak) / 2**20:.3f} MiB measured")

# %% [markdown]
# ## Ask why, keep it, ship it
#
# `plan.explain` gives reasons; `plan.save` writes readable JSON that loads without solving; `plan.export` writes a folder
# that trains with torch and safetensors alone; `plan.report("plan.html")` writes one page with hover and zoom.

# %%
print(plan.explain("blocks.2.mlp.0"))

# %%
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    path = plan.save(Path(folder) / "plan.json")
    again = Plan.load(path, model, batch, progress=False)
    print(f"{path.stat().st_size:,} bytes; the same schedule: {again.schedule == plan.schedule}")
    print(sorted(p.name for p in plan.export(Path(folder) / "step").iterdir()))

# %% [markdown]
# ## Ask for too little
#
# `minimum_budget` gives the smallest budget known to work and a proved floor: no plan goes below it. A smaller budget is
# refused with both.

# %%
from planner import minimum_budget

smallest, floor = minimum_budget(model, batch, progress=False)
print(f"{smallest:.3f} MiB works, and nothing below {floor:.3f} MiB can")
try:
    auto_checkpoint(model, batch, budget_mb=0.9 * floor, time_limit=10, progress=False)
except BudgetError as error:
    print(error)
