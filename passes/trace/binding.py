"""A call's arguments by the names of its signature, and the call again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .structure import Bound

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def forward_signature(model: nn.Module, may_inject: bool = False) -> inspect.Signature:
    """What `model.forward` can be called with.

    Of a decorated one that takes anything (`*args, **kwargs`), that is what the function within takes, by the names
    that users know, and further arguments by name, which the decorator may take for itself.

    Args:
        may_inject: whether such a decorator may also give arguments of its own, so that none is required.
    """
    signature, own = inspect.signature(model.forward), inspect.signature(model.forward, follow_wrapped=False)
    kinds = {p.kind for p in own.parameters.values()}
    if own == signature or not kinds.issuperset(VARIADIC):
        return own
    missing = (p.replace(default=None) if p.kind not in VARIADIC and p.default is p.empty else p
               for p in signature.parameters.values())  # fmt: skip
    parameters = list(missing if may_inject else signature.parameters.values())
    rest = next(p for p in own.parameters.values() if p.kind is p.VAR_KEYWORD)
    if not parameters or parameters[-1].kind is not rest.kind:
        parameters.append(rest)
    return signature.replace(parameters=parameters)


def bind_call(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound:
    """Arguments by name; raises TypeError exactly as a call would."""
    return Bound(signature.bind(*args, **kwargs).arguments, kwargs)


def binder(signature: inspect.Signature) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Bound]:
    """`bind_call` for one signature, without its walk along the parameters for calls that are as most are."""
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind not in VARIADIC]
    by_place = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in VARIADIC}
    rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    known = set(names)
    if any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters):
        return lambda args, kwargs: bind_call(signature, args, kwargs)

    def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound:
        given = dict(zip(names, args, strict=False))
        twice = kwargs and not given.keys().isdisjoint(kwargs)
        given.update((name, kwargs[name]) for name in names if name in kwargs)
        others = {name: value for name, value in kwargs.items() if name not in known}
        if len(args) > by_place or twice or not needed <= given.keys() or (others and rest is None):
            return bind_call(signature, args, kwargs)  # which says what is wrong
        if others and rest is not None:
            given[rest] = others
        return Bound(given, kwargs)

    return bind


def names_given(bound: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that the call gave by name, where that is known."""
    return bound.by_name if isinstance(bound, Bound) else frozenset()


def call_bound(function: Callable[..., Any], signature: inspect.Signature, bound: Mapping[str, Any]) -> Any:
    """Call with arguments bound by `bind_call`, each given by name or by its place as it was then."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    by_name, gap = names_given(bound), False
    for name, parameter in signature.parameters.items():
        kind = parameter.kind
        if name not in bound:
            gap = True
        elif kind is parameter.VAR_POSITIONAL:
            args.extend(bound[name])
        elif kind is parameter.VAR_KEYWORD:
            kwargs.update(bound[name])
        elif kind is parameter.POSITIONAL_ONLY or (
            kind is parameter.POSITIONAL_OR_KEYWORD and not gap and name not in by_name
        ):
            args.append(bound[name])
        else:
            kwargs[name] = bound[name]
    return function(*args, **kwargs)
