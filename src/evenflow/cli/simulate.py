"""`evenflow simulate`: a trace or a drawn load in virtual time, under one policy or several. Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from evenflow.advisor.memory import LLAMA_3_1_8B, ModelShape
from evenflow.bench.plots import pyplot
from evenflow.cli.completion import complete_model
from evenflow.cli.model_files import read_shape
from evenflow.cli.options import JsonTarget, duration_option, file_option, option, takes_options, target_option
from evenflow.cli.output import progress, text_console, write_json
from evenflow.cli.simulate_view import draw_percentiles, draw_timeline, print_forecasts
from evenflow.core.policies import PolicySpec, split_policies
from evenflow.core.roofline import ModelWork
from evenflow.duration import parse_target
from evenflow.errors import InvalidConfig, InvalidInput
from evenflow.simulation.cluster import Setup
from evenflow.simulation.forecast import Forecast, forecast
from evenflow.simulation.load import Lengths, Load, LoadSettings, Synthetic, read_load
from evenflow.simulation.observing import Targets
from evenflow.simulation.routing import ROUTERS, router_of
from evenflow.simulation.rules import DEFAULT_BUDGET, other_rules
from evenflow.simulation.step_times import StepTimes, estimated, find_step_times, shipped

_DEFAULT_POLICY = f"vllm:{DEFAULT_BUDGET}"
_DRAWN_REQUESTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What arrives."""

    fit: Path | None = option("Draw requests like this trace's instead of replaying one.", metavar="PATH")
    requests: int | None = option("Only this many requests.", min=1, show_default=f"all; {_DRAWN_REQUESTS} if drawn")
    speed: float = option("How much faster than recorded.", default=1.0, min=0.0001)
    rate: float | None = option("Requests a second, drawn instead of a trace's times.", min=0.0001)
    burstiness: float = option("Of drawn arrivals: 1 is Poisson, more is bursts.", default=1.0, min=0.01)
    prompt_tokens: str | None = option(
        "Drawn prompts: their median, and the spread of logarithms.", metavar="N[:SPREAD]"
    )
    output_tokens: str | None = option("The same for answers, and for texts without answers.", metavar="N[:SPREAD]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What serves it."""

    device: str | None = option("A recorded device (docs/simulate.md), a file of step times, or a GPU to estimate.")
    model: str | None = option(
        "The model of an estimate.", metavar="MODEL", show_default="Llama-3.1-8B's shape", autocompletion=complete_model
    )
    kv_tokens: int | None = option("Tokens that the KV cache holds, as the engine logs it.", min=16)
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
    trace: Annotated[
        Path | None,
        Argument(metavar="[TRACE]", help="Azure, BurstGPT, Mooncake, ShareGPT, agents', or a benchmark's results."),
    ] = None,
    load: LoadOptions,
    server: ServerOptions,
    study: StudyOptions,
) -> None:
    """Predict what users of a load would see, with intervals.

    Serves it in virtual time, by the scheduler that serves it for real, on a device whose step times were recorded.
    """
    with other_rules():
        _simulate(trace, load, server, study)


def _simulate(trace: Path | None, load: LoadOptions, server: ServerOptions, study: StudyOptions) -> None:
    # Everything that can be wrong is checked before anything slow.
    device = _device(server)
    targets = Targets(None if study.tbt_target is None else parse_target(study.tbt_target), study.ttft_target)
    policies = _policies(server, study.tbt_target)
    router_of(server.router)
    load_of = _loads(trace, load)
    if study.plot is not None or study.timeline is not None:
        pyplot()
    with progress("Reading") as say:
        first = load_of(study.seed)
        setups = [_setup(device, policy, server, targets) for policy in policies]
        found = [forecast(load_of, one, num_runs=study.runs, seed=study.seed, say=say) for one in setups]
    print_forecasts(text_console(study.json), first, device, targets, found)
    if study.plot is not None:
        draw_percentiles(study.plot, found, targets)
    if study.timeline is not None:
        draw_timeline(study.timeline, found)
    write_json(study.json, _report(first, device, targets, server, found))


def _device(server: ServerOptions) -> StepTimes:
    if server.device is None:
        raise InvalidInput(f"Got no --device: give {', '.join(shipped())}, a file of step times, or a GPU's name.")
    if (known := find_step_times(server.device)) is not None:
        if server.model is not None:
            raise InvalidInput(f"Got --model with --device {server.device!r}, which has a model: leave it out.")
        return known
    shape = LLAMA_3_1_8B if server.model is None else read_shape(server.model)
    return estimated(server.device, _work_of(shape), (shape.num_heads, shape.num_kv_heads), shape.name)


def _work_of(shape: ModelShape) -> ModelWork:
    """Of a dense decoder with gated MLPs."""
    width = shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    layer = shape.hidden_size * width + 3 * shape.hidden_size * shape.intermediate_size
    weights = shape.num_layers * layer + shape.hidden_size * shape.vocab_size
    return ModelWork(
        num_layers=shape.num_layers,
        row_flops=2 * weights,
        weight_bytes=weights * shape.value_bytes,
        position_flops=4 * shape.num_layers * shape.num_heads * shape.head_dim,
        cache_bytes=shape.kv_bytes_per_token,
    )


def _policies(server: ServerOptions, tbt_target: str | None) -> list[PolicySpec]:
    usual = [_DEFAULT_POLICY] + ([f"target:{tbt_target}"] if tbt_target is not None else [])
    texts = usual if server.policy is None else split_policies(server.policy)
    policies = [PolicySpec.parse(text).bounded(server.max_num_batched_tokens) for text in texts]
    if len({str(one) for one in policies}) < len(policies):
        raise InvalidConfig(f"Got --policy {server.policy!r} but expected each policy once.")
    return policies


def _setup(device: StepTimes, policy: PolicySpec, server: ServerOptions, targets: Targets) -> Setup:
    num_blocks = device.num_blocks if server.kv_tokens is None else server.kv_tokens // device.block_size
    if num_blocks is None:
        raise InvalidInput(
            "The size of the KV cache is not known: give --kv-tokens, the number that the engine logs when it starts "
            "(vLLM: GPU KV cache size)."
        )
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


def _loads(trace: Path | None, load: LoadOptions) -> Callable[[int], Load]:
    """The load of each seed: a replayed trace is the same for all, unless its times are drawn."""
    for name, value in (("speed", load.speed), ("rate", load.rate), ("burstiness", load.burstiness)):
        if value is not None and not math.isfinite(value):
            raise InvalidInput(f"Got --{name} {value} but expected a number.")
    if trace is not None and load.fit is not None:
        raise InvalidInput("Got a trace and --fit: give the trace to replay, or the one to draw requests like.")
    if trace is None and load.fit is None:
        return _drawn(load)
    output = None if load.output_tokens is None else round(Lengths.parse(load.output_tokens, "--output-tokens").median)
    settings = LoadSettings(
        limit=load.requests if trace is not None else None,
        speed=load.speed,
        rate=load.rate if trace is not None else None,
        burstiness=load.burstiness,
        default_output=output,
    )
    if load.prompt_tokens is not None:
        raise InvalidInput("Got --prompt-tokens with a trace, whose prompts have lengths: leave one out.")
    if trace is not None:
        read = cache(lambda seed: read_load(trace, settings, seed))
        return lambda seed: read(seed if load.rate is not None else 0)
    assert load.fit is not None
    like = Synthetic.fitted(read_load(load.fit, settings), load.requests, load.rate)
    return like.draw


def _drawn(load: LoadOptions) -> Callable[[int], Load]:
    if load.rate is None or load.prompt_tokens is None or load.output_tokens is None:
        raise InvalidInput("Got no trace: give one, or --fit, or all of --rate, --prompt-tokens and --output-tokens.")
    prompt = Lengths.parse(load.prompt_tokens, "--prompt-tokens")
    output = Lengths.parse(load.output_tokens, "--output-tokens")
    drawn = Synthetic(
        name=f"drawn: {load.rate:g} requests/s, prompts {load.prompt_tokens}, answers {load.output_tokens}",
        num_requests=load.requests or _DRAWN_REQUESTS,
        rate=load.speed * load.rate,
        burstiness=load.burstiness,
        lengths=lambda rng: (prompt.draw(rng), output.draw(rng)),
    )
    return drawn.draw


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
