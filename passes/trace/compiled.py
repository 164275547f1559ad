"""Modules on which `compile()` was called: a plan runs the ops of its own step, and no compiler's."""

from __future__ import annotations

from torch import nn

from .._torch import is_compiled
from ..errors import OnlyInEager, Unsupported


def refuse_compiled(model: nn.Module) -> None:
    """Raise Unsupported for a model that is compiled in place before there is a plan of it; later it may be."""
    if is_compiled(model):
        raise Unsupported(
            "compiled module", f"the model ({type(model).__name__}, by its compile())",
            "a plan replaces what the compiler would compile",
            "Call compile() after planning and plan.apply(model): it then runs the planned step as it is. Or compile "
            'the model under a budget: torch.compile(model, backend="checkpoint_planner", options={"budget_mb": ...}).',
        )  # fmt: skip


def refuse_compiled_parts(model: nn.Module) -> None:
    """Raise OnlyInEager for a submodule that is compiled in place, in what is to be one step."""
    for name, part in model.named_modules():
        if name and is_compiled(part):
            raise OnlyInEager(
                "compiled submodule", f"{name} ({type(part).__name__}, by its compile())",
                "a planned step runs its ops without the compiler, and would have other bits",
                'Plan the model before compile() is called, or by regions (regions="auto", or patterns), between which '
                "it runs compiled, as it is.",
            )  # fmt: skip
