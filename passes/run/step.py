"""Running a planned step: the forward as one node of autograd's graph, the backward as a chain of small ones.

The backward is one program (a generator). Each node of the chain owns some parameters: it resumes the program until
their gradients have been computed, and hands them to autograd, which accumulates them and runs their hooks before it
goes on to the next node. So gradients leave while the backward proceeds, as in eager.

The saved tensors are held in a list that the backward empties into its own variables, so each dies at its last use.
A change of what it reads between forward and backward raises, as autograd's own check of saved tensors would.
Needs torch alone: exports hold a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ._torch import (
    Autocast,
    active_autocast,
    after_backward,
    is_wanted,
    kernel_settings,
    overwrite,
    passed_back,
    run_below_autograd,
    under_default_dtype,
    under_transform,
)
from .arena import Arena, Spacers, ask_for
from .arrivals import kind, listed
from .errors import PlannerError
from .listeners import Listeners, Readers, Taken
from .mixing import Versions, warn_of_changed_view, watch_sum
from .random import set_rng_state
from .replay import DRAWS, HookDraws, as_tensor, copy_generator, old_value
from .stale import note_casts
from .tensors import alone, apart, distinct, is_laid_out, laid_out, nodes_behind, places_of


class BackwardTwice(PlannerError, RuntimeError):
    """A second backward through one planned forward: its saved tensors were freed by the first."""


class DoubleBackward(PlannerError, RuntimeError):
    """`backward(create_graph=True)` through a planned step."""


class ChangedInPlace(PlannerError, RuntimeError):
    """What the backward still reads was changed."""


class OtherAnswer(PlannerError, RuntimeError):
    """What the forward asks about values that it computes is answered otherwise than it was in the sample."""


class Half(Protocol):
    """Half of a step; a `GraphModule`, for one."""

    @property
    def forward(self) -> Callable[[list[torch.Tensor]], Any]: ...


class Fallback(Protocol):
    """What one call of a step asks for, should its backward be another one than planned."""

    def __call__(
        self, primals: Sequence[torch.Tensor], generators: dict[str, torch.Generator | None],
        gradients: dict[int, torch.Tensor], taken: dict[int, Taken], /,
    ) -> list[Any]:  # fmt: skip
        """The gradients of the primals, or None, from the generators before the forward and the outputs' gradients.

        What was `taken` off some outputs listens to theirs.
        """

    def learn(self, gradients: dict[int, torch.Tensor], /) -> None:
        """Note the outputs' gradients of a backward that cannot be replayed: the next call is planned for such."""

    def changed(self) -> str:
        """What Python that the backward runs reads and is not what it was in the forward, in words; "" for nothing."""

    def compare(self, results: Sequence[torch.Tensor], /) -> None:
        """Raise OtherAnswer where the forward's results, of which nothing was used yet, are not the plain forward's."""

    def compared(
        self, gradients: dict[int, torch.Tensor], planned: Callable[[], list[Any]] | None, /
    ) -> list[Any] | None:
        """The gradients of the primals, where this call's are compared with the plain backward's; else None.

        Args:
            planned: runs the planned backward, for all of them; None where they may not come all at once.
        """

    def not_needed(self) -> None:
        """Note that the backward is the planned one."""

    def failed(self, error: Exception) -> None:
        """Note what the planned forward raised, which has left all as it was."""

    @property
    def path(self) -> str:
        """The module that the step is of, in the model; "" for the whole of it."""


@dataclass(frozen=True)
class Step:
    """A planned step, ready to run on any tensors of the planned shapes. Holds no tensor of the model.

    Attributes:
        forward, backward: the two halves (see `passes.rewrite.Rewritten`).
        mutated: primals that the forward overwrites with its first results.
        num_outputs: results after those.
        saved_primals: primals handed to the backward.
        differentiable: per output, whether the plain model's output requires a gradient.
        expected: outputs whose gradients the backward takes, in order.
        tangent_strides: the layout each of those gradients must have: sums over another have other bits.
        keep_primals: primals whose value from before the step a fallback would need and the step overwrites.
        rng_devices: devices whose generators the forward draws from.
        hold_outputs: keep the outputs' memory until the backward is done, as planned for, whether or not the caller
            does.
        leaves: groups of primals whose gradients the backward hands over together, in this order, the last at its end.
        arrivals: the primals in the order in which gradients come to them in a plain step.
        reads: which parameters the backward reads on its way to each of the groups.
        sums: primals that the forward reads more than once, so that their gradients are sums.
        views: outputs that are views in the plain step, which reads their memory more than once itself.
        names: what the primals are called.
        others: primals that get a gradient only where the backward starts from other outputs than planned for.
        starts: what to call the `expected` outputs.
        autocast: what the backward was traced under. Under another one the plain backward casts in other places.
        exact: whether gradients are the plain step's bit for bit; if not, those that the backward takes are copied into
            the planned layout instead of replaying it.
        arena: bytes of the segments that CUDA's caching allocator is asked for before the first step.
        spacers: what asks for the spacers that the halves have.
        again: whether the backward runs ops of the forward again.
        draws: whether the backward draws random numbers of its own.
        uncounted: those of `mutated` whose change eager does not count as one: a plain batch norm's running statistics.
        casts: parameters that autocast casts.
        readers: for each output, the others that are computed from it.
        output_names: what the outputs are called.
        asked: for each of the last outputs, which are answers to the forward's questions about values, where it was
            asked and what the sample's answer was.
        told: names of primals of which a warning was given that their gradients are summed in another order, and
            `DRAWS` where one was given of hooks.
    """

    forward: Half
    backward: Half
    mutated: tuple[int, ...]
    num_outputs: int
    saved_primals: tuple[int, ...]
    differentiable: tuple[bool, ...]
    expected: tuple[int, ...]
    tangent_strides: tuple[tuple[int, ...], ...]
    keep_primals: tuple[int, ...] = ()
    rng_devices: tuple[str, ...] = ()
    hold_outputs: bool = True
    leaves: tuple[tuple[int, ...], ...] = ((),)
    arrivals: tuple[int, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ((),)
    sums: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    others: tuple[int, ...] = ()
    starts: tuple[str, ...] = ()
    autocast: Autocast = ()
    arena: Arena = ()
    exact: bool = True
    again: bool = False
    draws: bool = False
    uncounted: tuple[int, ...] = ()
    casts: tuple[int, ...] = ()
    readers: Readers = ()
    output_names: tuple[str, ...] = ()
    asked: tuple[tuple[str, bool], ...] = ()
    told: set[str] = field(default_factory=set, compare=False)
    spacers: Spacers = field(default_factory=Spacers, compare=False)

    def __call__(
        self, primals: Sequence[torch.Tensor], fallback: Fallback | None,
        sources: Sequence[torch.Tensor] | None = None, owners: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Run the forward; gradients flow when `backward` is called on an output.

        Args:
            fallback: the backward from other outputs than planned for, or for gradients in another layout; without one
                the first is refused, and the second are copied into the planned layout.
            sources: for each primal the tensor whose changes in place are changes of it, where that is another one.
            owners: for each primal the tensor that it was made of by one op, where that is another one (a `DTensor`).
                What this op's backward makes of a gradient goes to the owner as soon as the gradient is there: left to
                autograd, it would run after all nodes of the chain, which are younger.

        Raises:
            PlannerError: under a transform of `torch.func`.
            StaleCasts: a parameter was changed while autocast keeps a cast of it.
        """
        refuse_transform(primals)
        owners, sources = primals if owners is None else owners, primals if sources is None else sources
        if self.casts:
            note_casts((self.names[i], sources[i]) for i in self.casts)
        run = _Run(self, fallback, primals, sources, owners)
        token = run.token
        for place in reversed(range(len(run.owned))):
            token = PlannedGradients.apply(run, place, token, *(owners[i] for i in run.owned[place]))
        results: tuple[Any, ...] = PlannedStep.apply(run, token)
        if self.readers:
            run.listeners = Listeners(results, self.readers, self.output_names)
        return results


def refuse_transform(tensors: Iterable[torch.Tensor | None]) -> None:
    """Raise where a transform of `torch.func` or `torch.jit.trace` runs this, or has to do with the tensors."""
    refuse_tracing()
    if under_transform(tensors):
        raise PlannerError(
            "a planned step runs under loss.backward() and torch.autograd.grad; torch.func.grad, vmap, jvp and the "
            "other transforms cannot look into it, nor can forward-mode differentiation and batched gradients "
            "(is_grads_batched). Give them the original model."
        )


def refuse_tracing() -> None:
    """Raise where `torch.jit.trace` or `torch.export` runs this."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise PlannerError(
            f"torch.{'jit.trace' if torch.jit.is_tracing() else 'export'} cannot look into a planned step: give it the "
            "original model (plan.remove(model) where the plan was applied)."
        )


class _Run:
    """One execution of a step: what its forward kept, and its backward as far as it got.

    Attributes:
        others: as of the step, except for those with a hook or a custom function before them: autograd would call that
            with no gradient, where eager does not call it.
        owned: the primals of each node of the chain, in the order of the backward, as the node lists them.
        listed: of each of them, its place among what the backward hands over there.
        token: what chains the nodes: an empty tensor on the device on which autograd is to run them.
        program: the backward, which yields the gradients of one node after another.
        read: the parameters that it reads.
        sums: as of the step, with one of those that autocast casts, except for tensors with hooks, after which a
            gradient is another tensor.
        given: the primals as they came, without autograd: assigning to a parameter's `data` does not change them.
        replayed: all gradients, where the fallback found them.
        sources: of each primal the tensor whose version tells of changes.
        owners: of each primal the tensor that its gradient goes to.
        number: how many there have been.
        made_by: the nodes of the primals that were made of others.
    """

    number = 0

    def __init__(
        self, step: Step, fallback: Fallback | None, primals: Sequence[torch.Tensor], sources: Sequence[torch.Tensor],
        owners: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self.step, self.fallback, self.primals, self.sources = step, fallback, primals, sources
        pairs = () if owners is primals else enumerate(zip(primals, owners, strict=True))
        self.made_by = {i: p.grad_fn for i, (p, own) in pairs if p is not own}
        self.owners = owners
        self.others = tuple(i for i in step.others if owners[i].requires_grad and not _has_listener(owners[i]))
        parts = (*step.leaves[:-1], (*step.leaves[-1], *self.others))
        self.listed, self.owned = listed(parts, tuple(map(kind, owners)), step.arrivals)
        self.token = torch.empty(0, device=next((p.device for p in owners if p.requires_grad), None))
        ask_for(step.arena, self.token.device, step.spacers)
        self.versions = [p._version for p in sources]
        self.settings, self.dtype = kernel_settings() if step.again else {}, torch.get_default_dtype()
        self.given: Sequence[torch.Tensor] = [p.detach() for p in primals]
        _Run.number += 1
        looked_at = step.casts[self.number % len(step.casts) :][:1] if step.casts else ()  # in turn: each costs time
        self.sums = {i for i in (*step.sums, *looked_at) if not owners[i]._backward_hooks}
        self.generators = {device: copy_generator(device) for device in step.rng_devices}
        self.overwritten = {i: old_value(primals[i]) for i in step.keep_primals}
        self.saved: list[torch.Tensor] | None = None
        self.held: list[torch.Tensor] | None = None
        self.shared: list[tuple[torch.Tensor, int]] = []
        self.views = Versions(())
        self.listeners = Listeners((), (), ())
        self.program: Iterator[list[Any]] | None = None
        self.replayed: list[Any] | None = None
        self.read: dict[int, torch.Tensor] = {}
        self.draws: HookDraws | None = None

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The outputs."""
        step, primals = self.step, self.primals
        try:
            results = run_below_autograd(step.forward.forward, list(self.given))
            self._compare_answers(results)
            if self.fallback is not None:
                self.fallback.compare(results)
        except Exception as error:
            self._failed(error)
            raise
        count, uncounted = len(step.mutated), frozenset(step.uncounted)
        overwrite([primals[i].data if i in uncounted else primals[i] for i in step.mutated], results[:count])
        for i in step.mutated:
            self.versions[i] = self.sources[i]._version
        outputs = distinct(results[count : count + step.num_outputs], step.differentiable)
        callers, saved = (*outputs, *primals), results[count + step.num_outputs :]
        held, places = places_of(callers), places_of(saved)
        theirs, kept = set(held), set(places)
        self.saved = [alone(s) if place in theirs else s for s, place in zip(saved, places, strict=True)]
        self.held = [o.detach() for o in outputs] if step.hold_outputs else None
        self.shared = [(t.detach(), t._version) for t, place in zip(callers, held, strict=True) if place in kept]
        self.views = Versions(outputs[i] for i in step.views)
        return outputs

    def _compare_answers(self, results: Sequence[torch.Tensor]) -> None:
        asked, end = self.step.asked, len(self.step.mutated) + self.step.num_outputs
        for (place, sample), answer in zip(asked, results[end - len(asked) : end], strict=True):
            if bool(answer) != sample:
                raise OtherAnswer(f"the answer at {place} is {not sample}, and was {sample} for the sample")

    def _failed(self, error: Exception) -> None:
        """Put the generators back, as nothing else was changed yet. What we refuse ourselves is no failure."""
        for device, generator in self.generators.items():
            if generator is not None:
                set_rng_state(generator.get_state(), device)
        if self.fallback is not None and (isinstance(error, OtherAnswer) or not isinstance(error, PlannerError)):
            self.fallback.failed(error)

    def start(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin the backward from the gradients of the outputs; it runs when it is resumed."""
        step = self.step
        refuse_transform(gradients)
        self.replayed, taken = None, self.listeners.take()
        if all(g is None for g in gradients):  # autograd passes this node on its way to others
            self.replayed = [None] * len(self.versions)
            return
        self._check()
        if self.views.changed:
            warn_of_changed_view()
        present = tuple(i for i, g in enumerate(gradients) if g is not None)
        given = [g for g in gradients if g is not None]
        planned = present == step.expected and active_autocast() == step.autocast
        alike = not (planned and step.exact) or all(map(is_laid_out, given, step.tangent_strides))
        if not planned or taken or (not alike and self.fallback is not None):
            self.replayed = self._replay(dict(zip(present, given, strict=True)), taken)
            return
        if not alike:
            warnings.warn(
                f"a gradient of {', '.join(step.starts)} comes in other strides than planned for, and there is no "
                "plain model to run: it is copied into those, and sums over it differ from the plain model's in their "
                "last bits. For the same bits plan with loss_fn=, so that the loss is part of the step.",
                stacklevel=2,
            )
        self._check_settings()
        if self.fallback is not None and (changed := self.fallback.changed()):
            raise ChangedInPlace(
                f"what the backward reads was changed between forward and backward: {changed}. A planned step has read "
                "it in the forward. Change it after the backward, or before the forward."
            )
        if step.draws and not all(is_wanted(self.owners[i]) for part in step.leaves for i in part):
            raise PlannerError(
                "the backward of the planned step draws random numbers, and torch.autograd.grad (or inputs=) asks for "
                "some gradients alone: the plain model draws for those, the planned step for all. Call "
                "loss.backward(), or the original model."
            )
        tangents = [laid_out(g, s) for g, s in zip(given, step.tangent_strides, strict=True)]
        self._check_primals(step.saved_primals)
        self.read = {i: self.sources[i] for part in step.reads for i in part}
        self._watch_hooks()
        values = (self.given[i] for i in step.saved_primals)
        self.program = step.backward.forward([*(self.saved or ()), *values, *tangents])
        if self.fallback is not None:
            self.fallback.not_needed()
            hooked = any(_has_hooks(self.owners[i]) for part in self.owned for i in part)  # which run in between
            all_at_once = None if hooked else self._all_gradients
            self.replayed = self.fallback.compared(dict(zip(present, given, strict=True)), all_at_once)
        self.saved, self.primals, self.owners, self.sources, self.given, self.overwritten = None, (), (), (), (), {}

    def _all_gradients(self) -> list[Any]:
        """What the backward hands over, in the order of the primals."""
        found: list[Any] = [None] * len(self.versions)
        for place, owned in enumerate(self.owned):
            for i, gradient in zip(owned, self._next_ones(place), strict=True):
                found[i] = gradient
        return found

    def _watch_hooks(self) -> None:
        hooked = [i for part in self.owned for i in part if _has_hooks(self.owners[i])]
        if len(hooked) > 1 and DRAWS not in self.step.told:
            devices = (str(self.owners[i].device) for i in hooked)
            self.draws = HookDraws([self.step.names[i] for i in hooked], devices, self.step.told)
            after_backward(self.draws.look)

    def _check(self) -> None:
        if self.saved is None:
            raise BackwardTwice(
                "backward was called a second time through one forward of a planned module: its saved tensors are "
                "freed as the first backward reads them, whatever retain_graph says. Call the module again for every "
                "backward, or add the losses and call backward once."
            )
        if torch.is_grad_enabled():
            raise DoubleBackward(
                "create_graph=True asks for gradients of gradients, which a planned step does not keep what is needed "
                "for. Compute this loss with the original model, or leave create_graph out."
            )
        if any(output._version != version for output, version in self.shared):
            raise ChangedInPlace(
                "an input or output of the planned step was changed in place between forward and backward, and the "
                "backward needs its old value. Change a clone() of it, or use the out-of-place form."
            )
        self.shared = []

    def _check_settings(self) -> None:
        now = kernel_settings() if self.settings else {}
        changed = next((name for name in now if now[name] != self.settings[name]), None)
        if changed is not None:
            raise ChangedInPlace(
                f"torch's {changed} is {now[changed]}, in the forward {self.settings[changed]}: what the backward of "
                "the planned step computes again would have other bits than it had there. Run both under one setting."
            )

    def _replay(self, gradients: dict[int, torch.Tensor], taken: dict[int, Taken]) -> list[Any]:
        if self.fallback is None:
            if taken:
                i = next(iter(taken))
                later = next(j for j in self.step.readers[i] if j in gradients)
                self.listeners.refuse(i, later, f"{self.step.output_names[i]} has a hook, or retain_grad()")
            starts, autocast = ", ".join(self.step.starts), dict(self.step.autocast) or "no autocast"
            raise PlannerError(
                f"backward must start from {starts} (that is what was planned), and from nothing else, and under "
                f"{autocast}."
            )
        try:
            self._check_primals(range(len(self.primals)))
        except ChangedInPlace:
            self.fallback.learn(gradients)
            raise
        old = {i: as_tensor(value, self.primals[i]) for i, value in self.overwritten.items()}
        self.saved = None
        primals = [old.get(i, p) for i, p in enumerate(self.primals)]
        with under_default_dtype(self.dtype):
            found = self.fallback(primals, self.generators, gradients, taken)
        owned = {i for part in self.owned for i in part}
        for i, gradient in enumerate(found):
            if (gradient is None) == (i in owned) and _has_listener(self.owners[i]):
                raise PlannerError(
                    f"{self.step.names[i]} has a hook, or comes from a custom autograd function, and whether it gets a "
                    "gradient depends on the outputs that the backward starts from. The plan expected others; call the "
                    "module again: it is then planned for these."
                )
        return found

    def _check_primals(self, indices: Iterable[int]) -> None:
        for i in frozenset(indices).difference(self.step.mutated):
            primal, given = self.primals[i], self.given[i]
            if self.sources[i]._version != self.versions[i]:
                how = "changed in place"
            elif primal.data_ptr() != given.data_ptr() and not torch.equal(primal, given):
                how = "given other data (.data = ...)"
            else:
                continue
            raise ChangedInPlace(
                f"{self.step.names[i]} was {how} between forward and backward, and the backward of the planned step "
                "needs its old value. Change it after the backward."
            )

    def resume(self, place: int) -> tuple[Any, ...]:
        """Run the backward up to the gradients of a node of the chain; nothing else holds them then."""
        if self.replayed is not None:
            found = tuple(self.replayed[i] for i in self.owned[place])
            for i in self.owned[place]:
                self.replayed[i] = None
            return found
        changed = [i for i in self.step.reads[place] if self.read[i]._version != self.versions[i]]
        if changed:
            raise ChangedInPlace(
                f"{self.step.names[changed[0]]} was changed in place while the backward of the planned step ran, which "
                "still reads it: a hook may change a parameter once that parameter's own gradient is there, but no "
                "other one."
            )
        return self._next_ones(place)

    def _next_ones(self, place: int) -> tuple[Any, ...]:
        """What the backward hands over at its next node, which is the one at `place`."""
        assert self.program is not None
        with under_default_dtype(self.dtype):
            handed = run_below_autograd(next, self.program)
        found: tuple[Any, ...] = apart(handed)
        handed.clear()
        if place == len(self.owned) - 1:
            self.program, self.held, self.read = None, None, {}
            found = (*found, *(None for _ in self.others))
        return tuple(found[k] for k in self.listed[place])


def _has_hooks(primal: torch.Tensor) -> bool:
    return bool(primal._backward_hooks or (primal.is_leaf and primal._post_accumulate_grad_hooks))


def _has_listener(primal: torch.Tensor) -> bool:
    """Whether something of the caller's hears of a gradient on its way to the leaves, even that there is none."""
    return bool(primal._backward_hooks) or any(map(_listens, nodes_behind([primal])))


def _listens(node: Any) -> bool:
    """Whether a node is of a custom autograd function, or of a leaf with hooks."""
    ours = getattr(node, "_forward_cls", None) in (PlannedGradients, PlannedStep)
    custom = isinstance(node, torch.autograd.function.BackwardCFunction) and not ours
    return custom or bool(getattr(getattr(node, "variable", None), "_backward_hooks", None))


def _silence(node: Any) -> None:
    """Let hooks that follow the accumulation of a gradient not be called where there is none: torch would call them."""
    hooks = getattr(getattr(node, "variable", None), "_post_accumulate_grad_hooks", None)
    if not hooks:
        return
    waiting: dict[int, Any] = {}

    def before(gradients: Any) -> None:
        if gradients[0] is None:  # nor did anything else than the planned step give one
            waiting.update(hooks)
            hooks.clear()

    def after(*_: Any) -> None:
        hooks.update(waiting)
        for handle in handles:
            handle.remove()

    handles = node.register_prehook(before), node.register_hook(after)


def _say_nan(gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """Name the first gradient with NaN in it, of which torch knows no more than the node that hands it over."""
    name = next((name for name, gradient in gradients if gradient is not None and gradient.isnan().any()), None)
    if name is not None:
        warnings.warn(
            f"the planned step computed NaN in the gradient of {name}. Anomaly mode does not see the ops of a planned "
            "step: to be told which one it was, and its line, take this step with the plain model.",
            stacklevel=2,
        )


class PlannedGradients(torch.autograd.Function):
    """A node of the chain: it hands over the gradients of the primals that it owns."""

    @staticmethod
    def forward(ctx: Any, run: _Run, place: int, token: torch.Tensor, *primals: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.place = run, place
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> tuple[Any, ...]:
        run = ctx.run
        if run.draws is not None:
            run.draws.look()
        found = list(run.resume(ctx.place))
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            path = f"{run.fallback.path}." if run.fallback is not None and run.fallback.path else ""
            _say_nan(zip((f"{path}{run.step.names[i]}" for i in run.owned[ctx.place]), found, strict=True))
        following = ctx.next_functions[1:]  # made anew each time that it is read
        for place, i in enumerate(run.owned[ctx.place]):
            if i in run.sums and found[place] is not None:
                found[place] = alone(found[place])
                watch_sum(following[place], found[place], run.step.names[i], run.step.told, i in run.step.casts)
            if found[place] is None:
                _silence(following[place][0])
            elif i in run.made_by:
                found[place] = passed_back(run.made_by[i], found[place])
        if run.draws is not None:
            run.draws.leave()
        return (None, None, token, *found)


class PlannedStep(torch.autograd.Function):
    """The node of the outputs, from which the backward starts."""

    @staticmethod
    def forward(ctx: Any, run: _Run, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        outputs = run.forward()
        if not all(run.step.differentiable):
            marked = zip(outputs, run.step.differentiable, strict=True)
            ctx.mark_non_differentiable(*(o for o, differentiable in marked if not differentiable))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.run.start(gradients)
        return None, ctx.run.token
