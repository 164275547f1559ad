"""`python -m tests.databases`: torch's own op and module databases, each sample planned at its stated minimum.

Outputs, gradients, buffers and the generator must be bitwise those of the plain step, the peak at most the predicted
one; what cannot be planned must be refused by name. Exits with 1 where a sample is wrong, raises another error or needs
more memory than predicted.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import sys
import time
import warnings
from collections import Counter

from rich.console import Console
from rich.table import Table

from tests.databases.cases import DTYPES, FORMS, cases
from tests.databases.check import BAD, Result, check


def main() -> int:
    """Print what is not equal, then how many are what; 1 where anything is bad."""
    faulthandler.enable()
    options = _options()
    warnings.simplefilter("ignore")
    gc.freeze()  # the databases are large, and nothing of them is ever dropped
    console, results, start = Console(width=180), [], time.perf_counter()
    part, parts = options.part
    for position, case in enumerate(cases(DTYPES[options.dtype], options.forms, options.samples, options.names)):
        if position % parts != part:
            continue
        if options.verbose:
            print(case.name, file=sys.stderr, flush=True)
        result = check(case)
        results.append(result)
        if result.verdict in BAD or (options.refused and result.verdict == "refused"):
            print(f"{result.verdict:8} {result.name}: {result.detail}", flush=True)
    console.print(table(results, options.dtype, time.perf_counter() - start))
    return int(any(r.verdict in BAD for r in results))


def table(results: list[Result], dtype: str, seconds: float) -> Table:
    """How many samples have which verdict; the refused ones by reason."""
    counts = Counter(r.verdict for r in results)
    tried = len(results) - counts["skipped"]
    shown = Table("verdict", "samples", "share", title=f"{dtype}: {len(results)} samples in {seconds:.0f} s")
    for verdict in ("equal", "refused", *BAD, "skipped"):
        share = "" if verdict == "skipped" else f"{counts[verdict] / max(1, tried):.2%}"
        shown.add_row(verdict, str(counts[verdict]), share)
    for reason, count in Counter(r.detail.partition(":")[0] for r in results if r.verdict == "skipped").items():
        shown.add_row(f"  skipped: {reason}", str(count), "")
    return shown


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names or patterns of ops and modules (all)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="where the loss is (both)")
    parser.add_argument("--samples", type=int, default=1, help="how many of each op (1); of modules all are taken")
    parser.add_argument("--part", type=_part, default=(0, 1), help="i/n: every n-th sample, the i-th of them first")
    parser.add_argument("--refused", action="store_true", help="show what is refused, too")
    parser.add_argument("--verbose", action="store_true", help="say which sample runs")
    return parser.parse_args()


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"{text!r}: it takes i/n with 1 <= i <= n")
    return part - 1, parts


if __name__ == "__main__":
    sys.exit(main())
