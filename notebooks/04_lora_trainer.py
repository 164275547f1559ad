# %% [markdown]
# # LoRA in `Trainer` under half the memory
#
# A planner is tried in a loop of one's own, and used in somebody else's. Here a small language model is fine-tuned with
# PEFT's LoRA in transformers' `Trainer`: bfloat16 autocast, gradients accumulated over two batches, evaluation on the
# way. One callback plans the model on the first real batch and keeps each step within half of the plain step's peak.
# The weights are random (nothing is downloaded), and the data is a task that can be learned: to go on counting.
#
# Needs `pip install transformers accelerate peft`.

# %%
import logging
import tempfile
import warnings

warnings.filterwarnings("ignore")

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from passes.memory import measure_peak
from planner.integrations.transformers import PlanCallback

logging.getLogger("transformers").setLevel(logging.ERROR)
MIB = 2**20


class Counting(Dataset):
    """Sequences that count from anywhere."""

    def __len__(self):
        return 512

    def __getitem__(self, i):
        tokens = (7 * i + torch.arange(128)) % 64
        return {"input_ids": tokens, "labels": tokens}


def model():
    torch.manual_seed(0)
    shape = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 64, "n_positions": 128}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    base = GPT2LMHeadModel(GPT2Config(**shape, **tokens, initializer_range=0.1))
    base.config.loss_type = "ForCausalLMLoss"
    adapters = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.1, target_modules="all-linear", fan_in_fan_out=True)
    return get_peft_model(base, adapters)


model().print_trainable_parameters()

# %% [markdown]
# ## The trainer, and the callback
#
# Nothing about the trainer changes but its list of callbacks. Both runs are seeded alike, dropout included.


# %%
def trainer(model, *callbacks, **changes):
    options = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 12, "learning_rate": 5e-3,
        "bf16": True, "use_cpu": True, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 4,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, **changes,
    }
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), **options)
    held_out = torch.utils.data.Subset(Counting(), range(16))
    made = Trainer(model, arguments, train_dataset=Counting(), eval_dataset=held_out, callbacks=list(callbacks))
    made.log = lambda logs, *_: made.state.log_history.append(logs)  # kept, not printed
    return made


def losses(made, name="loss"):
    return [logs[name] for logs in made.state.log_history if name in logs]


plain = trainer(model())
plain.train()
plain_losses, plain_eval = losses(plain), losses(plain, "eval_loss")
print(f"plain: loss {plain_losses[0]:.3f} -> {plain_losses[-1]:.3f}, evaluated {[round(x, 3) for x in plain_eval]}")

# %%
planning = PlanCallback(budget_mb="50%", time_limit=10, progress=False)
planned = trainer(model(), planning)
planned.train()
planned_losses, planned_eval = losses(planned), losses(planned, "eval_loss")
print("the same losses, bit for bit:", planned_losses == plain_losses and planned_eval == plain_eval)
weights = zip(plain.model.state_dict().values(), planned.model.state_dict().values(), strict=True)
print("the same weights:", all(torch.equal(a, b) for a, b in weights))

# %% [markdown]
# ## The plan that was made
#
# `planning.plan` is the plan of the first batch, in the trainer's precision and with its loss arguments. The base is
# frozen, so only the adapters have gradients and an optimizer's state, both counted. Its "instead of" is a step that
# recomputes nothing but already runs the planner's fused ops; the plain loop, measured below, needs more than that.

# %%
plan = planning.plan
plan

# %% [markdown]
# ## Measured
#
# Whole training loops, by the allocator's own events: forward, backward, clipping, the optimizer's step. A second trainer
# around the same model, with the same callback, runs the same plan, so that planning itself is not measured along with it.

# %%
resident = sum(t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in plain.model.state_dict().values()}.values())


def loop_peak(model, *callbacks):
    made = trainer(model.train(), *callbacks, max_steps=2, eval_strategy="no")
    return resident + measure_peak(made.train)


peaks = {"plain": loop_peak(plain.model), "planned": loop_peak(planned.model, planning)}
for name, peak in peaks.items():
    print(f"{name}: {peak / MIB:.2f} MiB measured over the loop")
print(f"budget: {plan.budget_bytes / MIB:.2f} MiB, predicted {plan.peak_bytes / MIB:.2f} MiB")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(2, 1), layout="constrained")
left.plot(plain_losses, color="#b8b8b8", linewidth=6, label="plain")
left.plot(planned_losses, color="#1f5fa8", linewidth=1.6, label="planned")
left.set(title="Loss: one line on the other", xlabel="optimizer step", ylabel="training loss")
left.legend(frameon=False)
right.bar(list(peaks), [p / MIB for p in peaks.values()], color=["#b8b8b8", "#1f5fa8"], width=0.6)
right.axhline(plan.budget_bytes / MIB, color="#c0392b", linewidth=1, linestyle="--")
right.text(1, plan.budget_bytes / MIB, "budget", color="#c0392b", ha="center", va="bottom")
right.set(title="Peak of the loop", ylabel="MiB")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Afterwards
#
# When training ends the model has its own forward back. Adapters are saved, merged and unloaded as ever; what else
# runs under a plan, and in which order, is in `docs/training.md`.

# %%
print(type(planned.model).__name__, "runs a plan:", hasattr(planned.model.forward, "runs_plan"))
merged = planned.model.merge_and_unload()
merged.eval()
batch = {name: torch.stack([Counting()[i][name] for i in range(16)]) for name in ("input_ids", "labels")}
with torch.no_grad():
    print(f"{type(merged).__name__}, adapters merged: loss {merged(**batch).loss:.3f}")
