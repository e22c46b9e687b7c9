"""`evenflow tune`: targets in, configuration out, by simulating candidates. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evenflow.bench.plots import pyplot
from evenflow.cli.options import JsonTarget, duration_option, file_option, option, takes_options, target_option
from evenflow.cli.output import progress_bar, text_console, write_json
from evenflow.cli.simulated import DeviceOptions, LoadOptions, TraceArgument, device_of, loads_of, num_blocks_of
from evenflow.cli.tune_view import print_choices, write_choices
from evenflow.core.policies import PolicySpec
from evenflow.duration import parse_target
from evenflow.errors import InvalidInput
from evenflow.simulation.cluster import Setup
from evenflow.simulation.observing import Targets
from evenflow.simulation.routing import ROUTERS, router_of
from evenflow.simulation.rules import other_rules
from evenflow.simulation.step_times import BEYOND, StepTimes
from evenflow.simulation.tuning import Candidate, Choice, Tuner

_BUDGETS = (2048, 64, 128, 256, 512, 1024, 4096, 8192)  # the first is tried first
_MAX_NUM_SEQS = (256, 64, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalOptions:
    """What is wanted, and of what."""

    tbt_target: str | None = target_option("Users want each gap between tokens within this.")
    ttft_target: float | None = duration_option("Users want the first token within this.")
    share: float = option("Share of requests that must be within the targets.", default=0.99, min=0.01, max=1.0)
    engine: str = option("Engines to configure.", default="evenflow,vllm,sglang", metavar="ENGINE,...")
    max_replicas: int = option("At most this many.", default=64, min=1, max=4096)
    router: str = option(f"One of: {', '.join(ROUTERS)}.", default="round-robin")
    runs: int = option("Runs of the configuration that is chosen, for its intervals.", default=5, min=1)
    seed: int = option("Of the first run.", default=0)
    html: Path | None = file_option("Write the report with plots to this file, as one HTML page.")
    json: JsonTarget = None


@takes_options
def tune(
    *,
    trace: TraceArgument = None,
    load: LoadOptions,
    hardware: DeviceOptions,
    goal: GoalOptions,
) -> None:
    """Find settings that keep your targets on a load.

    Simulates candidates in virtual time: budgets or a target, requests at a time, replicas. Prints the best of each
    engine with its command line, the predicted figures with 90% intervals, what limits it, and what more load does.
    """
    with other_rules():
        _tune(trace, load, hardware, goal)


def _tune(trace: Path | None, load: LoadOptions, hardware: DeviceOptions, goal: GoalOptions) -> None:
    # Everything that can be wrong is checked before anything slow.
    device = device_of(hardware)
    targets = Targets(None if goal.tbt_target is None else parse_target(goal.tbt_target), goal.ttft_target)
    if not any(targets):
        raise InvalidInput("Got no target: give --tbt-target, --ttft-target or both, such as 50ms and 2s.")
    router_of(goal.router)
    engines = _engines(goal.engine)
    model = hardware.model or "MODEL"
    candidates = {name: _within(_ENGINES[name](goal.tbt_target, model), device) for name in engines}
    setup = Setup(
        step_times=device,
        policy=PolicySpec.parse("fixed:2048"),
        num_blocks=num_blocks_of(device, hardware),
        router=goal.router,
        targets=targets,
    )
    load_of = lru_cache(maxsize=2)(loads_of(trace, load))  # nearly all runs have the same one
    if goal.html is not None:
        pyplot()
    with progress_bar("Reading") as say:
        first = load_of(goal.seed)
        tuner = Tuner(
            load_of=load_of,
            setup=setup,
            share=goal.share,
            max_replicas=goal.max_replicas,
            num_runs=goal.runs,
            seed=goal.seed,
            say=say,
        )
        choices = {name: tuner.choose(of_engine) for name, of_engine in candidates.items()}
    print_choices(text_console(goal.json), first, device, targets, goal.share, choices)
    if goal.html is not None:
        write_choices(goal.html, first, device, targets, goal.share, choices)
    write_json(goal.json, _report(targets, goal, choices))


def _engines(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(_ENGINES) or len(set(names)) < len(names):
        raise InvalidInput(f"Got --engine {text!r} but expected some of {','.join(_ENGINES)}, each once.")
    return names


Make = Callable[[str | None, str], list[Candidate]]


def _candidates(policies: Sequence[tuple[str, str]], seqs_flag: str) -> list[Candidate]:
    """Of policies with their command lines, each with every number of requests at a time."""
    return [
        Candidate(policy=PolicySpec.parse(policy), max_num_seqs=most, command=f"{command} {seqs_flag} {most}")
        for policy, command in policies
        for most in _MAX_NUM_SEQS
    ]


def _of_evenflow(tbt_target: str | None, model: str) -> list[Candidate]:
    serve = f"evenflow serve --model {model}"
    policies = [(f"fixed:{budget}", f"{serve} --policy fixed:{budget}") for budget in _BUDGETS]
    if tbt_target is not None:
        policies.insert(0, (f"target:{tbt_target}", f"{serve} --tbt-target {tbt_target}"))
    return _candidates(policies, "--max-num-seqs")


def _of_vllm(tbt_target: str | None, model: str) -> list[Candidate]:
    serve = f"vllm serve {model} --max-num-batched-tokens"
    return _candidates([(f"vllm:{budget}", f"{serve} {budget}") for budget in _BUDGETS], "--max-num-seqs")


def _of_sglang(tbt_target: str | None, model: str) -> list[Candidate]:
    serve = f"python -m sglang.launch_server --model-path {model} --chunked-prefill-size"
    policies = [(f"sglang:{budget}", f"{serve} {budget}") for budget in _BUDGETS]
    policies += [(f"sglang-mixed:{budget}", f"{serve} {budget} --enable-mixed-chunk") for budget in _BUDGETS]
    return _candidates(policies, "--max-running-requests")


_ENGINES: dict[str, Make] = {"evenflow": _of_evenflow, "vllm": _of_vllm, "sglang": _of_sglang}


def _within(candidates: Sequence[Candidate], device: StepTimes) -> list[Candidate]:
    """Those whose steps the device knows."""
    largest = device.largest
    if largest is None:
        return list(candidates)
    rows, streams = BEYOND * largest.rows, BEYOND * largest.decodes
    least = min(_MAX_NUM_SEQS)
    return [
        one
        for one in candidates
        if (one.policy.target is not None or one.policy.budget <= rows) and one.max_num_seqs <= max(least, streams)
    ]


def _report(targets: Targets, goal: GoalOptions, choices: dict[str, Choice]) -> dict[str, Any]:
    return {"targets": targets._asdict(), "share": goal.share, "router": goal.router, "choices": choices}
