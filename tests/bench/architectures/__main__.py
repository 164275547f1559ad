"""`python -m tests.bench.architectures [--only NAME ...] [--regions auto]`: other people's architectures, planned.

Small random configurations of transformers' auto classes, of diffusers and of MONAI, with their default behaviours
(layer drop, SpecAugment, dropout, one plain step before planning). Each that trains plainly is planned at a share of its
plain step, or at the minimum that the refusal states, and compared with plain eager bit for bit in three steps: loss,
gradients, buffers, generators; the peak is measured, too. Each runs in a process of its own under limits of time and
memory. With `--results FILE` what is in the file is not run again. Exits with 1 under `--goal`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .case import GOOD, SKIPPED, Record, examine
from .catalogue import Entry, entries


def main() -> int:
    """Run what is missing, print the table."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [e for e in entries(options.all) if not options.only or any(o in e.name for o in options.only)]
    known = _read(options.results)
    records = []
    for entry in chosen:
        record = known.get(entry.name)
        if record is None:
            record = in_a_process(entry, options)
            _append(options.results, record)
            print(f"{record.verdict:12}{record.name}: {record.detail or _figures(record)}", flush=True)
        records.append(record)
    console = Console(width=150)
    console.print(counts(records), reasons(records))
    tried = [r for r in records if r.verdict not in SKIPPED]
    return int(sum(r.verdict in GOOD for r in tried) < options.goal / 100 * len(tried))


def in_a_process(entry: Entry, options: argparse.Namespace) -> Record:
    """`examine` in a fork, which has everything imported, under limits."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _examine_and_leave(entry, options, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if told:
        return Record(**json.loads(told))
    ended = os.waitstatus_to_exitcode(status)
    why = f"no answer within {options.seconds} s" if ended == -signal.SIGALRM else f"ended with {ended}"
    return Record(entry.name, entry.task, "limit", why)


def _examine_and_leave(entry: Entry, options: argparse.Namespace, writing: int) -> None:
    limit = int(options.gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.alarm(options.seconds)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    asked: dict[str, Any] = {"time_limit": options.time_limit, "check": options.check}
    if options.regions:
        asked["regions"] = options.regions
    start = time.perf_counter()
    try:
        record = examine(entry, options.share, asked, options.plain)
    except MemoryError:
        record = Record(entry.name, entry.task, "limit", f"more than {options.gib} GiB")
    record.figures["wall"] = round(time.perf_counter() - start, 1)
    os.write(writing, json.dumps(record.json()).encode())
    os._exit(0)


def counts(records: list[Record]) -> Table:
    """How many have which verdict, by task."""
    verdicts = list(dict.fromkeys((*GOOD, *(r.verdict for r in records))))
    shown = Table("task", *verdicts, "of those that train", title=f"{len(records)} architectures")
    for task in (*dict.fromkeys(r.task for r in records), "all"):
        ours = [r for r in records if task in (r.task, "all")]
        found = Counter(r.verdict for r in ours)
        tried = sum(n for v, n in found.items() if v not in SKIPPED)
        share = f"{sum(found[v] for v in GOOD)} of {tried}"
        share += f" ({sum(found[v] for v in GOOD) / tried:.1%})" if tried else ""
        shown.add_row(task, *(str(found[v] or "") for v in verdicts), share)
    return shown


def reasons(records: list[Record]) -> Table:
    """Why some are not planned, the most frequent reason first."""
    bad = [r for r in records if r.verdict not in (*GOOD, "plain")]
    grouped: dict[tuple[str, str], list[str]] = {}
    for record in bad:
        reason = re.sub(r" at [^:]*:\d+:? ?(`[^`]*`)?|\(.*?\)|\d+", "", record.detail)[:110]
        grouped.setdefault((record.verdict, reason), []).append(record.name)
    shown = Table("verdict", "reason", "architectures", title="not planned")
    for (verdict, reason), names in sorted(grouped.items(), key=lambda item: (item[0][0] in SKIPPED, -len(item[1]))):
        shown.add_row(verdict, reason, f"{len(names)}: {', '.join(n.partition(' ')[0] for n in names)}")
    return shown


def _figures(record: Record) -> str:
    figures = record.figures
    parts = [f"{figures[k]:g} {k}" for k in ("wall", "ops", "regions") if k in figures]
    if "measured" in figures:
        parts.append(f"peak {figures['measured'] / figures['predicted']:.4f} of predicted, +{figures['overhead']:.1%}")
    return ", ".join(parts)


def _read(path: Path | None) -> dict[str, Record]:
    if path is None or not path.exists():
        return {}
    records = [Record(**json.loads(line)) for line in path.read_text().splitlines() if line]
    return {r.name: r for r in records}


def _append(path: Path | None, record: Record) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(record.json()) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--all", action="store_true", help="every architecture that there is, not a spread of them")
    parser.add_argument("--regions", help='as in auto_checkpoint: "auto", "whole" or a pattern')
    parser.add_argument("--check", action="store_true", help="let the planner check each plan by running it, too")
    parser.add_argument("--share", type=int, default=60, help="of what the plain step needs above static, in %%")
    parser.add_argument("--plain", action="store_true", help="only whether each trains plainly")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to go on with")
    parser.add_argument("--time-limit", type=float, default=2.0, help="of the solver")
    parser.add_argument("--seconds", type=int, default=180, help="for one architecture")
    parser.add_argument("--gib", type=float, default=8, help="address space of one architecture")
    parser.add_argument("--goal", type=float, default=97, help="%% of those that train plainly to be planned")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
