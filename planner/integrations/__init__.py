"""The planner inside other tools: trainers' loops, and `torch.compile`."""

from .first_batch import FirstBatch, plan_on_first_batch

__all__ = ["FirstBatch", "plan_on_first_batch"]
