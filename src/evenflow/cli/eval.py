"""`evenflow eval`: scores the answers to a file of tasks, on one endpoint or on two that are compared."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from evenflow.cli.eval_view import print_report, report_object
from evenflow.cli.options import JsonTarget, ModelOptions, engine_settings, option, takes_options
from evenflow.cli.output import progress, text_console, write_json
from evenflow.cli.sides import CHUNKED, check_sides, is_policy, open_sides, policy_of
from evenflow.core.policies import split_policies
from evenflow.errors import EndpointFailed, InvalidInput
from evenflow.evals.journal import Header, Journal, digest_of
from evenflow.evals.report import make_report
from evenflow.evals.run import Evaluation, missing_tasks
from evenflow.evals.tasks import AnyTask, CodeTask, read_tasks, shipped_sets
from evenflow.host import cache_folder

_TASKS_HELP = f"A JSONL file of tasks, or a shipped set: {', '.join(shipped_sets())}."
_ENDPOINTS = "http://..., hf:FOLDER (transformers), or a policy of the embedded engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What is asked, where, and where the answers are kept."""

    endpoint: str | None = option(
        f"What to evaluate: {_ENDPOINTS}.", "-m", "--endpoint", metavar="ENDPOINT", show_default=CHUNKED
    )
    compare: str | None = option(f"Compare two endpoints, such as {CHUNKED},unchunked.", metavar="A,B")
    items: int | None = option("Ask only the first N tasks.", "-n", "--items", metavar="N", min=1, show_default="all")
    time_limit: float | None = option("Start no more tasks after this many seconds.", metavar="S", min=0)
    concurrency: int = option("Requests in flight.", default=4, min=1)
    seed: int = option("Seed for whose turn it is, and for the intervals.", default=0)
    run_code: bool = option("Run the programs in answers to tasks with the scorer code.", "--run-code", default=False)
    journal: Path | None = option("Keep the answers in this file.", metavar="PATH", show_default="in the cache folder")
    resume: bool = option("Go on with the journal of the same run, after a crash or an end.", "--resume", default=False)
    json: JsonTarget = None


@takes_options
def evaluate(
    *,
    tasks: Annotated[str, Argument(metavar="TASKS", help=_TASKS_HELP)],
    options: EvalOptions,
    model: ModelOptions,
) -> None:
    """Score a model's answers to tasks, on one endpoint or on two.

    Every answer goes into a journal at once, so that --resume goes on after a crash. For servers, --model is the name
    of a served model, and $EVENFLOW_API_KEY the key.
    """
    sides = _sides(options)
    asked = read_tasks(tasks, options.items, partial(print, file=sys.stderr))
    if any(isinstance(task, CodeTask) for task in asked) and not options.run_code:
        raise InvalidInput(
            f"{tasks} has tasks whose answers are programs to run: add --run-code to run them here, under limits on "
            "time, memory, files and network."
        )
    settings = _settings(sides, model)
    header = _header(tasks, asked, sides, settings, options)
    with _open_journal(header, options) as journal:
        try:
            _ask(asked, journal, sides, settings, options)
        except BaseException:
            _leave(asked, journal)
            raise
        report = make_report(asked, journal)
    if not any(side.num_scored for side in report.sides) and report.errors:
        raise EndpointFailed(f"All requests failed; the first: {report.errors[0]}")
    print_report(text_console(options.json), tasks, report)
    write_json(options.json, report_object(journal, report))


def _sides(options: EvalOptions) -> list[str]:
    if options.compare is None:
        sides = [options.endpoint or CHUNKED]
    elif options.endpoint is not None:
        raise InvalidInput("Got both -m and --compare: name the two endpoints in --compare.")
    else:
        sides = split_policies(options.compare)
        if len(sides) != 2:
            raise InvalidInput(
                f"Got --compare {options.compare!r} but expected two endpoints, such as chunked,unchunked."
            )
    check_sides(sides)
    return sides


def _described(side: str) -> str:
    return f"{side} ({policy_of(side)})" if policy_of(side) != side else side


def _header(
    tasks: str, asked: Sequence[AnyTask], sides: Sequence[str], settings: dict[str, Any], options: EvalOptions
) -> Header:
    kept = {name: value for name, value in settings.items() if name != "threads"}
    return Header(
        tasks=tasks,
        digest=digest_of(asked),
        sides=[_described(side) for side in sides],
        settings=kept | {"concurrency": options.concurrency, "seed": options.seed},
    )


def _settings(sides: Sequence[str], model: ModelOptions) -> dict[str, Any]:
    settings = engine_settings(model)
    if not any(map(is_policy, sides)):
        usual = engine_settings(ModelOptions())
        given = [name for name, value in settings.items() if name != "model" and usual.get(name) != value]
        if given:
            raise InvalidInput(
                f"Got --{given[0].replace('_', '-')} but {' and '.join(sides)} would not know: it is a setting of the "
                "embedded engine."
            )
    return settings


def _open_journal(header: Header, options: EvalOptions) -> Journal:
    if options.journal is not None:
        return Journal.resume(options.journal, header) if options.resume else Journal.create(options.journal, header)
    folder = cache_folder() / "evals"
    if not options.resume:
        name = f"{Path(header.tasks).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{header.key}.jsonl"
        return Journal.create(folder / name, header)
    found = sorted(folder.glob(f"*-{header.key}.jsonl"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise InvalidInput(
            f"Got --resume but {folder} holds no journal of these tasks, endpoints and settings: leave it out, or name "
            "the --journal."
        )
    return Journal.resume(found[-1], header)


def _num_done(tasks: Sequence[AnyTask], journal: Journal) -> str:
    """Such as "3 of 8 answers"; a request that failed will be asked again."""
    num_sides = len(journal.header.sides)
    num_missing = sum(len(missing_tasks(tasks, journal, side)) for side in range(num_sides))
    num_all = num_sides * len(tasks)
    return f"{num_all - num_missing} of {num_all} answers"


def _leave(tasks: Sequence[AnyTask], journal: Journal) -> None:
    """Say how to go on after an interruption or a failure, if there is anything to go on with."""
    if journal.entries:
        print(f"Stopped with {_num_done(tasks, journal)}; the same command with --resume goes on.", file=sys.stderr)
    else:
        journal.discard()


def _ask(
    tasks: Sequence[AnyTask], journal: Journal, sides: Sequence[str], settings: dict[str, Any], options: EvalOptions
) -> None:
    """Ask what the journal has no answer to; if it has all, nothing is loaded."""

    def say_where() -> None:
        if options.resume:
            print(f"Resuming: {_num_done(tasks, journal)} are there.", file=sys.stderr)
        print(f"Journal: {journal.path}", file=sys.stderr)

    if not any(missing_tasks(tasks, journal, side) for side in range(len(sides))):
        say_where()
        return

    async def run() -> None:
        # A prefix cache would favour the second of two sides.
        async with open_sides(sides, **settings, enable_prefix_caching=len(sides) == 1) as endpoints:
            with progress("Starting") as say:
                evaluation = Evaluation(
                    tasks,
                    journal,
                    concurrency=options.concurrency,
                    seed=options.seed,
                    time_limit_s=options.time_limit,
                    on_start=say_where,
                    on_answer=lambda: say(f"{len(journal.entries)} of {len(tasks) * len(sides)} answers"),
                )
                await evaluation.run(endpoints)

    asyncio.run(run())
