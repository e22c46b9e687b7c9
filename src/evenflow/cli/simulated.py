"""What is simulated: loads and devices, as options and as objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from typer import Argument

from evenflow.advisor.memory import LLAMA_3_1_8B, ModelShape
from evenflow.cli.completion import complete_model
from evenflow.cli.model_files import read_shape
from evenflow.cli.options import option
from evenflow.core.roofline import ModelWork
from evenflow.errors import InvalidInput
from evenflow.simulation.load import Lengths, Load, LoadSettings, Synthetic, read_load
from evenflow.simulation.step_times import StepTimes, estimated, find_step_times, shipped

_DRAWN_REQUESTS = 500

TraceArgument = Annotated[
    Path | None,
    Argument(metavar="[TRACE]", help="Azure, BurstGPT, Mooncake, ShareGPT, agents', or a benchmark's results."),
]


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
class DeviceOptions:
    """What the steps run on."""

    device: str | None = option("A recorded device (docs/simulate.md), a file of step times, or a GPU to estimate.")
    model: str | None = option(
        "The model of an estimate.", metavar="MODEL", show_default="Llama-3.1-8B's shape", autocompletion=complete_model
    )
    kv_tokens: int | None = option("Tokens that the KV cache holds, as the engine logs it.", min=16)


def device_of(options: DeviceOptions) -> StepTimes:
    if options.device is None:
        raise InvalidInput(f"Got no --device: give {', '.join(shipped())}, a file of step times, or a GPU's name.")
    if (known := find_step_times(options.device)) is not None:
        if options.model is not None:
            raise InvalidInput(f"Got --model with --device {options.device!r}, which has a model: leave it out.")
        return known
    shape = LLAMA_3_1_8B if options.model is None else read_shape(options.model)
    return estimated(options.device, _work_of(shape), (shape.num_heads, shape.num_kv_heads), shape.name)


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


def num_blocks_of(device: StepTimes, options: DeviceOptions) -> int:
    """The KV cache."""
    num_blocks = device.num_blocks if options.kv_tokens is None else options.kv_tokens // device.block_size
    if num_blocks is None:
        raise InvalidInput(
            "The size of the KV cache is not known: give --kv-tokens, the number that the engine logs when it starts "
            "(vLLM: GPU KV cache size)."
        )
    return num_blocks


def loads_of(trace: Path | None, load: LoadOptions) -> Callable[[int], Load]:
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
