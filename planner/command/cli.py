"""The command line: `checkpoint-planner` or `python -m planner`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from passes.printable import printable
from solvers import SOLVERS
from solvers.errors import MIB, PlannerError, mib_up

from .cli_options import (
    make_console,
    make_session,
    parse_budget,
    print_json,
    print_table,
    refuse_one_path,
    save_figure,
    set_aside,
)

INTERRUPTED = 130
app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Plan a training step under a memory budget, look at the plan, keep it, ship it.\n\n"
    "Exit codes: 0 done, 1 for `diff` when the plans differ, 2 an error (one line on standard error), 130 interrupted.",
)  # fmt: skip

FactoryArg = Annotated[str, typer.Argument(
    metavar="FACTORY", help="package.module:function or file.py:function; it returns (model, sample).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Solver = Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(SOLVERS)}.")]
Cost = Annotated[str, typer.Option(
    help="What recompute is measured in: roofline, device (measured once, kept in a file), measured, flops, or the "
    "rates of a named device as in roofline:h100.")]
Device = Annotated[str, typer.Option(
    metavar="NAME", help="Plan for another device than this machine's: cuda, cpu, h100, h200, a100, rtx4090.")]
TimeLimit = Annotated[float, typer.Option(help="Seconds the solver may take per budget.")]
Save = Annotated[list[str], typer.Option(
    metavar="HINT", help="Op, module or ATen op whose result must be saved; repeatable.")]
Once = Annotated[list[str], typer.Option(
    metavar="HINT", help="Op, module or ATen op that must run once; repeatable.")]
Prefer = Annotated[list[str], typer.Option(
    metavar="HINT", help="Op, module or ATen op to recompute where possible; repeatable.")]
Reserve = Annotated[str, typer.Option(metavar="SIZE", help="A size to leave free for anything else: 512MiB.")]
Optimizer = Annotated[str, typer.Option(
    metavar="NAME", help="Leave room for the state and the step of this optimizer of torch.optim: AdamW.")]
Gradients = Annotated[str, typer.Option(
    metavar="MODE", help="fresh; accumulated where .grad is there before the step and added to; "
    "consumed where a hook frees each gradient in the backward.")]
Regions = Annotated[list[str], typer.Option(
    metavar="PATTERN", help="auto, whole, or a pattern of module paths (model.layers.*); repeatable.")]
DropOutputs = Annotated[bool, typer.Option(
    "--drop-outputs", help="Nobody holds what the model returns besides its loss (logits, ...).")]

CheckHow = Annotated[bool | None, typer.Option(
    "--check/--no-check", show_default="where it is cheap", help="Run two steps, plain and planned, and compare them.")]


@app.command()
def demo(
    layers: Annotated[int, typer.Option(min=3, help="Transformer blocks; with fewer the head alone takes half.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Adam steps, plain and planned.")] = 20,
    time_limit: TimeLimit = 10.0,
) -> None:
    """Train a language model plain and at half its peak.

    Plans a GPT-2-class model with dropout at half of its peak without recompute, trains both, and prints one table.

    \b
    Example:
      checkpoint-planner demo
    """
    from .demo import print_demo

    print_demo(layers=layers, steps=steps, time_limit=time_limit)


@app.command()
def plan(
    factory: FactoryArg,
    budget: Annotated[str, typer.Option(help="512MiB, 4GB, or a share of the plain peak: 80%.")],
    out: Annotated[Path | None, typer.Option(help="Write the plan file here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the HTML report here.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write the runnable folder here.")] = None,
    solver: Solver = "auto",
    cost: Cost = "roofline",
    device: Device = "",
    time_limit: TimeLimit = 30.0,
    gap: Annotated[float, typer.Option(help="Stop within this share of the step's cost of the optimum.")] = 0.01,
    reserve: Reserve = "",
    optimizer: Optimizer = "",
    gradients: Gradients = "fresh",
    regions: Regions = ["auto"],  # noqa: B006
    drop_outputs: DropOutputs = False,
    save: Save = [],  # noqa: B006
    never_recompute: Once = [],  # noqa: B006
    recompute: Prefer = [],  # noqa: B006
    check: CheckHow = None,
    as_json: Json = False,
) -> None:
    """Plan the training step of a model under a budget.

    \b
    Examples:
      checkpoint-planner plan mymodels.gpt:make --budget 4GiB --out plan.json --report report.html
      checkpoint-planner plan train.py:make --budget 60% --time-limit 60
      checkpoint-planner plan train.py:make --budget 60% --never-recompute aten.mm --save "blocks.*.attention"
    """
    refuse_one_path(out=out, report=report, export=export)
    session = make_session(
        factory, solver=solver, cost=cost, device=device, time_limit=time_limit, gap=gap, reserve=reserve,
        optimizer=optimizer, gradients=gradients, regions=regions, drop_outputs=drop_outputs, save=save,
        never_recompute=never_recompute, recompute=recompute, check="auto" if check is None else check,
    )  # fmt: skip
    made = session.plan(parse_budget(budget, session))
    written = [("plan", out and made.save(out)), ("report", report and made.report(report)),
               ("folder", export and made.export(export))]  # fmt: skip
    if as_json:
        from planner.files.planfile import to_data

        data = {**to_data(made), "checked": {"steps": made.checked.steps, "compared": made.checked.compared}}
        print_json({key: data[key] for key in ("model", "options", "result", "schedule", "checked")})
        return
    from planner.show.text import renderable

    console = make_console()
    console.print(renderable(made, console.width))
    for name, path in written:
        if path:
            console.print(f"{name} written to {printable(path)}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="PLAN.JSON")], factory: FactoryArg, as_json: Json = False
) -> None:
    """Run a plan file's step beside its model's plain one.

    Two steps of each, from equal state, compared bit for bit. What differs is an error that names the first op.

    \b
    Example:
      checkpoint-planner check plan.json mymodels.gpt:make
    """
    from planner.plan import Plan

    from .factory import load_factory, make

    model, sample = make(load_factory(factory))
    found = Plan.load(path, model, sample, progress=False).check(sample=sample)
    if as_json:
        print_json({"steps": found.steps, "compared": found.compared})
    else:
        typer.echo(found.line)


@app.command()
def show(path: Annotated[Path, typer.Argument(metavar="PLAN.JSON")], as_json: Json = False) -> None:
    """Show a plan file, without its model.

    \b
    Example:
      checkpoint-planner show plan.json
    """
    from planner.files.planfile import read
    from planner.files.planfile_view import show_file, summary

    file = read(path)
    if as_json:
        print_json(summary(file))
    else:
        make_console().print(show_file(file))


@app.command()
def frontier(
    factory: FactoryArg,
    points: Annotated[int, typer.Option(min=2, help="How many budgets.")] = 10,
    plot: Annotated[Path | None, typer.Option(help="Write a picture here (.png, .svg or .pdf).")] = None,
    solver: Solver = "auto",
    cost: Cost = "roofline",
    device: Device = "",
    time_limit: TimeLimit = 10.0,
    reserve: Reserve = "",
    optimizer: Optimizer = "",
    gradients: Gradients = "fresh",
    regions: Regions = ["auto"],  # noqa: B006
    drop_outputs: DropOutputs = False,
    save: Save = [],  # noqa: B006
    never_recompute: Once = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Recompute against memory, for a range of budgets.

    From the smallest budget known to work to the plain peak.

    \b
    Example:
      checkpoint-planner frontier mymodels.gpt:make --points 10 --plot frontier.png
    """
    from planner.frontier import frontier_of

    session = make_session(
        factory, solver=solver, cost=cost, device=device, time_limit=time_limit, reserve=reserve, optimizer=optimizer,
        gradients=gradients, regions=regions, drop_outputs=drop_outputs, save=save, never_recompute=never_recompute,
    )  # fmt: skip
    found = frontier_of(session, points)
    if plot is not None:
        save_figure(found.plot(), plot)
    if as_json:
        print_json(found.to_dict())
        return
    rows = [(f"{p.budget_bytes / MIB:,.1f} MiB", f"{p.budget_bytes / found.plain_peak_bytes:.0%}", f"{p.overhead:.2%}",
             "" if p.bound is None else f"{p.bound:.2%}", p.status) for p in found.points]  # fmt: skip
    print_table(("budget", "of plain", "recompute", "proved bound", "status"), rows)


@app.command("min-budget")
def min_budget(
    factory: FactoryArg,
    time_limit: TimeLimit = 30.0,
    reserve: Reserve = "",
    optimizer: Optimizer = "",
    gradients: Gradients = "fresh",
    regions: Regions = ["auto"],  # noqa: B006
    drop_outputs: DropOutputs = False,
    save: Save = [],  # noqa: B006
    never_recompute: Once = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """The smallest budget that works, and the floor.

    The floor is proved: no budget below it can work.

    \b
    Example:
      checkpoint-planner min-budget mymodels.gpt:make
    """
    session = make_session(
        factory, time_limit=time_limit, reserve=reserve, optimizer=optimizer, drop_outputs=drop_outputs, save=save,
        gradients=gradients, regions=regions, never_recompute=never_recompute,
    )  # fmt: skip
    found = session.minimum()
    sizes = {"minimum_bytes": found.minimum_bytes, "floor_bytes": found.floor_bytes,
             "plain_peak_bytes": session.plain_peak_bytes}  # fmt: skip
    if as_json:
        print_json(sizes)
        return
    shown = {**{name: size / MIB for name, size in sizes.items()}, "minimum_bytes": mib_up(found.minimum_bytes)}
    print_table(("", "MiB", "of plain"), [
        (name.removesuffix("_bytes").replace("_", " "), f"{shown[name]:,.3f}", f"{size / session.plain_peak_bytes:.1%}")
        for name, size in sizes.items()
    ])  # fmt: skip


@app.command("max-batch")
def max_batch(
    factory: FactoryArg,
    budget: Annotated[str, typer.Option(help="The memory the step may take: 512MiB, 4GB.")],
    limit: Annotated[int, typer.Option(min=1, help="Largest batch to try.")] = 4096,
    solver: Solver = "auto",
    cost: Cost = "roofline",
    device: Device = "",
    time_limit: TimeLimit = 10.0,
    reserve: Reserve = "",
    optimizer: Optimizer = "",
    gradients: Gradients = "fresh",
    drop_outputs: DropOutputs = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan of that batch here.")] = None,
    as_json: Json = False,
) -> None:
    """The largest batch whose planned step fits. FACTORY takes the batch size.

    \b
    Example:
      checkpoint-planner max-batch mymodels.gpt:make_batch --budget 4GiB
    """
    from planner.frontier import max_batch as search
    from planner.units import parse_size

    from .factory import load_factory, make

    build = load_factory(factory)
    model, _ = make(build, 1)
    size = parse_size(budget) / MIB
    found = search(
        model, lambda n: make(build, n)[1], size, limit=limit, solver=solver, cost=cost, device=device,
        time_limit=time_limit, gradients=gradients, **set_aside(reserve, optimizer, drop_outputs),
    )  # fmt: skip
    if out is not None:
        found.plan.save(out)
    if as_json:
        print_json({"batch": found.batch, "plain_batch": found.plain_batch, "peak_bytes": found.plan.peak_bytes,
                     "overhead": found.plan.overhead})  # fmt: skip
        return
    batch = f"{found.batch} (the limit)" if found.batch == limit else str(found.batch)
    print_table(("", "batch", "peak", "recompute"), [
        ("plain", str(found.plain_batch or "none"), "", ""),
        ("planned", batch, f"{found.plan.peak_bytes / MIB:,.1f} MiB", f"{found.plan.overhead:.2%}"),
    ])  # fmt: skip


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A.JSON")],
    second: Annotated[Path, typer.Argument(metavar="B.JSON")],
    as_json: Json = False,
) -> None:
    """What differs between two plan files.

    Exit code 0 when they decide the same, 1 when not.

    \b
    Example:
      checkpoint-planner diff before.json after.json
    """
    from planner.files.planfile import read
    from planner.files.planfile_view import differences

    found = differences(read(first), read(second))
    if as_json:
        print_json([dict(zip(("what", "first", "second"), row, strict=True)) for row in found])
    elif found:
        print_table(("", str(first), str(second)), found)
    else:
        typer.echo("the plans decide the same")
    raise typer.Exit(1 if found else 0)


# Errors --------------------------------------------------------------------------------------------------------------


UsageError: Any = typer.BadParameter.__base__  # click's, wherever this typer keeps click


def main() -> None:
    """Entry point: an error is one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except PlannerError as error:
        _fail(str(error))
    except UsageError as error:
        if len(sys.argv) == 1:  # no verb: the message is the help
            error.show()
            sys.exit(2)
        _fail(f"{_sentence(error.format_message())} `{error.ctx.command_path} --help` tells more.")
    if code == INTERRUPTED:
        typer.echo("interrupted", err=True)
    sys.exit(code or 0)


def _sentence(text: str) -> str:
    """Of click's, which ends with a point, two or none."""
    text = text.rstrip(".")
    return text if text.endswith("?") else f"{text}."


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)
