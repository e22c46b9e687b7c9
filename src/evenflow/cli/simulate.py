"""`evenflow simulate`: a trace or a drawn load in virtual time, under one policy or several. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenflow.bench.plots import pyplot
from evenflow.cli.options import JsonTarget, duration_option, file_option, option, takes_options, target_option
from evenflow.cli.output import progress, text_console, write_json
from evenflow.cli.simulate_view import draw_percentiles, draw_timeline, print_forecasts
from evenflow.cli.simulated import DeviceOptions, LoadOptions, TraceArgument, device_of, loads_of, num_blocks_of
from evenflow.core.policies import PolicySpec, split_policies
from evenflow.duration import parse_target
from evenflow.errors import InvalidConfig
from evenflow.simulation.cluster import Setup
from evenflow.simulation.forecast import Forecast, forecast
from evenflow.simulation.load import Load
from evenflow.simulation.observing import Targets
from evenflow.simulation.routing import ROUTERS, router_of
from evenflow.simulation.rules import DEFAULT_BUDGET, other_rules
from evenflow.simulation.step_times import StepTimes

_DEFAULT_POLICY = f"vllm:{DEFAULT_BUDGET}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What serves it."""

    policy: str | None = option(
        "Policies to compare: evenflow's, and rules of vLLM and SGLang such as vllm:8192 (docs/simulate.md).",
        metavar="POLICY,...",
        show_default=f"{_DEFAULT_POLICY}, and target:T with --tbt-target T",
    )
    max_num_batched_tokens: int | None = option("Maximum tokens in a step, of policies without their own.", min=1)
    max_num_seqs: int = option("Maximum requests that run at a time.", default=256, min=1)
    long_prefill_token_threshold: int = option("Cap on one prompt's tokens per step; 0: none.", default=0, min=0)
    no_prefix_caching: bool = option("Compute every prompt whole.", "--no-prefix-caching", default=False)
    replicas: int = option("How many of them.", default=1, min=1, max=4096)
    sample: int | None = option("Simulate only this many of the replicas, drawn at random.", min=2, show_default="all")
    router: str = option(f"One of: {', '.join(ROUTERS)}.", default="round-robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """What to find out, and how surely."""

    tbt_target: str | None = target_option("Users want each gap between tokens within this.")
    ttft_target: float | None = duration_option("Users want the first token within this.")
    runs: int = option("Runs, each with a load, a device and a disturbance of its own.", default=5, min=1)
    seed: int = option("Of the first run.", default=0)
    plot: Path | None = file_option("Plot percentiles of gaps and TTFT to this file.")
    timeline: Path | None = file_option("Plot a run's requests and KV cache over time to this file.")
    json: JsonTarget = None


@takes_options
def simulate(
    *,
    trace: TraceArgument = None,
    load: LoadOptions,
    hardware: DeviceOptions,
    server: ServerOptions,
    study: StudyOptions,
) -> None:
    """Predict what users of a load would see, with intervals.

    Serves it in virtual time, by the scheduler that serves it for real, on a device whose step times were recorded.
    """
    with other_rules():
        _simulate(trace, load, hardware, server, study)


def _simulate(
    trace: Path | None, load: LoadOptions, hardware: DeviceOptions, server: ServerOptions, study: StudyOptions
) -> None:
    # Everything that can be wrong is checked before anything slow.
    device = device_of(hardware)
    num_blocks = num_blocks_of(device, hardware)
    targets = Targets(None if study.tbt_target is None else parse_target(study.tbt_target), study.ttft_target)
    policies = _policies(server, study.tbt_target)
    router_of(server.router)
    load_of = loads_of(trace, load)
    if study.plot is not None or study.timeline is not None:
        pyplot()
    with progress("Reading") as say:
        first = load_of(study.seed)
        setups = [_setup(device, num_blocks, policy, server, targets) for policy in policies]
        found = [
            forecast(load_of, one, num_runs=study.runs, seed=study.seed, sample=server.sample, say=say)
            for one in setups
        ]
    print_forecasts(text_console(study.json), first, device, targets, found)
    if study.plot is not None:
        draw_percentiles(study.plot, found, targets)
    if study.timeline is not None:
        draw_timeline(study.timeline, found)
    write_json(study.json, _report(first, device, targets, server, found))


def _policies(server: ServerOptions, tbt_target: str | None) -> list[PolicySpec]:
    usual = [_DEFAULT_POLICY] + ([f"target:{tbt_target}"] if tbt_target is not None else [])
    texts = usual if server.policy is None else split_policies(server.policy)
    policies = [PolicySpec.parse(text).bounded(server.max_num_batched_tokens) for text in texts]
    if len({str(one) for one in policies}) < len(policies):
        raise InvalidConfig(f"Got --policy {server.policy!r} but expected each policy once.")
    return policies


def _setup(device: StepTimes, num_blocks: int, policy: PolicySpec, server: ServerOptions, targets: Targets) -> Setup:
    return Setup(
        step_times=device,
        policy=policy,
        num_blocks=num_blocks,
        num_replicas=server.replicas,
        router=server.router,
        max_num_seqs=server.max_num_seqs,
        long_prefill_token_threshold=server.long_prefill_token_threshold,
        enable_prefix_caching=not server.no_prefix_caching,
        targets=targets,
    )


def _report(
    load: Load, device: StepTimes, targets: Targets, server: ServerOptions, found: Sequence[Forecast]
) -> dict[str, Any]:
    return {
        "load": {"name": load.name, "requests": len(load.requests), "seconds": load.seconds, "left_out": load.left_out},
        "device": {"name": device.name, "about": device.about, "is_estimate": device.is_estimate},
        "replicas": server.replicas,
        "router": server.router,
        "targets": targets._asdict(),
        "forecasts": found,
    }
