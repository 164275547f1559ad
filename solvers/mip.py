"""An integer program solved by HiGHS in a process of its own, so that it ends when its time is up.

In a root node HiGHS looks neither at its clock nor at a request to stop, for seconds on ten thousand columns and for
minutes on many more; a process can be ended. It sends each better bound and solution when it finds it, so that what it
had at its end counts. Ctrl-C or an error in the caller ends the process, and so does the end of the caller.

The process runs this file as a program; nothing else of the package is imported there.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

import highspy
import numpy as np

PARTS = ("num_col_", "num_row_", "col_cost_", "col_lower_", "col_upper_", "row_lower_", "row_upper_")
MATRIX = ("start_", "index_", "value_")
BOOT = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
GRACE_SECONDS = 0.3
STDOUT = 1

Message = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What is known of a program when its solve ends, or is ended.

    Attributes:
        bound: HiGHS's lower bound on the objective; -inf for none.
        values: the best solution's values by column, or None.
        infeasible: HiGHS found that there is no solution.
        done: False where the clock ended the solve.
        failure: why the process gave no answer; "" if it did.
    """

    bound: float = -math.inf
    values: np.ndarray | None = None
    infeasible: bool = False
    done: bool = False
    failure: str = ""


@dataclass
class Worker:
    """The process, started by the first program; `end` it."""

    process: subprocess.Popen[bytes] | None = None
    reader: Thread | None = None
    answers: SimpleQueue[Message | None] = field(default_factory=SimpleQueue)

    def solve(self, job: Message, deadline: float) -> Outcome:
        """Minimise the program of `job_of` until `deadline`; what goes wrong in the process is in the outcome."""
        outcome = Outcome()
        try:
            self._send({**job, "seconds": deadline - time.monotonic()})
            while not outcome.done:
                answer = self.answers.get(timeout=max(0.0, deadline + GRACE_SECONDS - time.monotonic()))
                if answer is None:
                    raise OSError("the process ended")
                outcome = replace(outcome, **answer)
        except Empty:
            self.end()
        except OSError as error:
            self.end()
            outcome = replace(outcome, failure=str(error))
        return outcome

    def end(self) -> None:
        """Kill the process, if there is one, and wait until it is gone; may be called again when interrupted."""
        process = self.process
        if process is None:
            return
        process.kill()
        process.wait()
        if self.reader is not None:
            with suppress(RuntimeError):  # Ctrl-C before it began
                self.reader.join()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was still to be sent
                pipe.close()
        self.process = None

    def _send(self, job: Message) -> None:
        if self.process is None:
            path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
            with _interrupts_deferred():  # else a process could have begun that nobody knows of
                self.process = subprocess.Popen(
                    [sys.executable or "python", "-c", BOOT, __file__], env=os.environ | path,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            self.answers = SimpleQueue()
            self.reader = Thread(target=_receive, args=(self.process.stdout, self.answers.put), daemon=True)
            self.reader.start()
        assert self.process.stdin is not None
        pickle.dump(job, self.process.stdin)
        self.process.stdin.flush()


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block."""
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    asked: list[tuple[int, Any]] = []
    previous: Any = signal.signal(signal.SIGINT, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if asked:
            previous(*asked[0])


def job_of(highs: Any, integer: np.ndarray, start: np.ndarray | None, options: dict[str, Any]) -> Message:
    """The program that an instance of HiGHS holds, with some columns integer, to be solved from `start`."""
    program = highs.getLp()
    parts = {name: _plain(getattr(program, name)) for name in PARTS}
    matrix = {name: _plain(getattr(program.a_matrix_, name)) for name in MATRIX}
    by_column = program.a_matrix_.format_ == highspy.MatrixFormat.kColwise
    return {"parts": parts, "matrix": matrix, "by_column": by_column, "integer": integer, "start": start,
            "options": options}  # fmt: skip


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else np.array(value)


def _receive(pipe: IO[bytes], take: Callable[[Message | None], None]) -> None:
    """Hand on what the process tells until it ends or tells nonsense, then None."""
    try:
        while line := pipe.readline():
            told = json.loads(line)
            message: Message = {"bound": float(told["bound"]), "infeasible": told["infeasible"], "done": told["done"]}
            data = pipe.read(8 * told["size"])
            if len(data) < 8 * told["size"]:
                break
            take({**message, "values": np.frombuffer(data)} if data else message)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    take(None)


@cache
def introduce() -> None:
    """Have HiGHS introduce itself where nobody reads it: from 1.16 on it does so once in a process, asked or not."""
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        kept, nowhere = os.dup(STDOUT), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # closed: there is nothing to keep quiet
        return
    try:
        os.dup2(nowhere, STDOUT)
        highspy.Highs()
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)
        os.close(nowhere)


def _tell(bound: float, values: Any = None, *, infeasible: bool = False, done: bool = False) -> None:
    """In the process: what is known by now, as a line of JSON and the values behind it."""
    data = b"" if values is None else np.array(values, dtype=np.float64).tobytes()
    line = json.dumps({"bound": bound, "infeasible": infeasible, "done": done, "size": len(data) // 8})
    sys.stdout.buffer.write(line.encode() + b"\n" + data)
    sys.stdout.buffer.flush()


def _minimise(job: Message) -> None:
    """In the process: solve one program, telling of every better bound and solution."""
    begin, best = time.monotonic(), -math.inf
    introduce()  # what the caller reads is a message
    highs = highspy.Highs()
    for name, value in {"output_flag": False, **job["options"]}.items():
        highs.setOptionValue(name, value)
    highs.passModel(_program(job))
    if job["start"] is not None:
        known = highspy.HighsSolution()
        known.col_value = job["start"]
        highs.setSolution(known)

    def bounded(event: Any) -> None:
        nonlocal best
        if event.data_out.mip_dual_bound > best:
            best = event.data_out.mip_dual_bound
            _tell(best)

    highs.cbMipInterrupt += bounded
    highs.cbMipImprovingSolution += lambda event: _tell(best, event.data_out.mip_solution)
    highs.setOptionValue("time_limit", max(0.05, job["seconds"] - (time.monotonic() - begin)))
    highs.run()
    info = highs.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    _tell(
        info.mip_dual_bound, highs.getSolution().col_value if feasible else None,
        infeasible=highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible, done=True,
    )  # fmt: skip


def _program(job: Message) -> Any:
    program = highspy.HighsLp()
    for name, value in job["parts"].items():
        setattr(program, name, value)
    for name, value in job["matrix"].items():
        setattr(program.a_matrix_, name, value)
    program.a_matrix_.num_col_, program.a_matrix_.num_row_ = program.num_col_, program.num_row_
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise if job["by_column"] else highspy.MatrixFormat.kRowwise
    kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
    program.integrality_ = [kinds[flag] for flag in job["integer"].tolist()]
    return program


def _work(jobs: SimpleQueue[Message]) -> None:
    try:
        while True:
            _minimise(jobs.get())
    finally:
        os._exit(1)  # an error in this thread would leave the caller waiting


def main() -> None:
    """Solve what arrives; the end of the caller ends this process in the middle of a solve too."""
    jobs: SimpleQueue[Message] = SimpleQueue()
    Thread(target=_work, args=(jobs,), daemon=True).start()
    while True:
        try:
            jobs.put(pickle.load(sys.stdin.buffer))  # noqa: S301  # from `Worker`
        except EOFError:
            os._exit(0)


if __name__ == "__main__":
    main()
