"""Devices of the simulator: fitted to a recording, as files that the package ships or a user made; or a roofline.

A file has the costs of a step's figures, other costs that fit the recording's loads about as well (drawn anew for each
run, so that what is not known shows in the intervals), how slow the device was from step to step, the host's time, and
the largest shapes that were recorded. Beyond these nothing is known.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from evenflow.core.plan import AttentionWaves, ExecutorCaps
from evenflow.core.roofline import DEVICES, ModelWork, WaveKernel, attention_waves, known_device, roofline
from evenflow.core.step_costs import figures_of
from evenflow.errors import InvalidInput
from evenflow.simulation.dense_fit import NUM_FIGURES, DenseFit
from evenflow.simulation.devices import BlockNoise, ModelDevice, StepWork

VERSION = 1
_FOLDER = "step_times"
BEYOND = 1.25  # times what was recorded
_ROOFLINE_FACTOR = 1.5  # see `estimate_factor`
_GPU_STEPS_IN_FLIGHT, _MANY_CHUNKS = 2, 1024


@dataclass(frozen=True, slots=True)
class Slowness:
    """Recorded steps in their order: how long each was, and how many times what its costs say."""

    seconds: Sequence[float]
    factors: Sequence[float]

    def noise(self, rng: random.Random) -> BlockNoise:
        """From a random moment on."""
        return BlockNoise(self.seconds, self.factors, rng.uniform(0.0, sum(self.seconds)))

    def as_json(self) -> dict[str, list[int]]:
        return {
            "us": [round(1e6 * seconds) for seconds in self.seconds],
            "permille": [round(1000 * factor) for factor in self.factors],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Slowness:
        return cls([us / 1e6 for us in content["us"]], [permille / 1000 for permille in content["permille"]])


@dataclass(frozen=True, slots=True)
class Launches:
    """Host seconds to launch steps of one kind."""

    step_s: float
    stream_s: float  # for each stream that decodes
    slowness: Slowness | None = None

    def seconds(self, rng: random.Random) -> Callable[[StepWork, float], float]:
        """In one run: of a step from a time on."""
        step, stream = self.step_s, self.stream_s
        if self.slowness is None:
            return lambda work, at: step + stream * work.num_decodes
        noise = self.slowness.noise(rng)
        return lambda work, at: (step + stream * work.num_decodes) * noise.at(at)

    def as_json(self) -> list[Any]:
        return [self.step_s, self.stream_s, None if self.slowness is None else self.slowness.as_json()]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> Launches:
        step, stream, slowness = content
        return cls(float(step), float(stream), None if slowness is None else Slowness.from_json(slowness))


NO_LAUNCHES = Launches(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What a step costs the host, in seconds."""

    schedule_s: float = 0.0
    output_s: float = 0.0  # from the device's end until the tokens are out
    # Of steps that only decode, with prefill, and with more rows than any graph.
    launches: tuple[Launches, Launches, Launches] = (NO_LAUNCHES, NO_LAUNCHES, NO_LAUNCHES)


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest figures of recorded steps."""

    rows: int
    decodes: int
    decode_context: int
    position: int  # of a prompt

    @classmethod
    def of(cls, works: Sequence[StepWork]) -> Largest:
        return cls(
            max(work.num_rows for work in works),
            max(work.num_decodes for work in works),
            max(work.decode_context for work in works),
            max((start + length for work in works for start, length in work.chunks), default=0),
        )

    def beyond(self, work: StepWork) -> str | None:
        """Which figure of a step is far beyond what was recorded; None if none is."""
        if work.num_decodes > BEYOND * self.decodes:
            return f"more than {self.decodes} streams"
        if work.decode_context > BEYOND * self.decode_context:
            return f"streams of more than {self.decode_context:,} tokens together"
        if work.chunks:
            if work.num_rows > BEYOND * self.rows:
                return f"more than {self.rows:,} rows"
            if max(start + length for start, length in work.chunks) > BEYOND * self.position:
                return f"prompts of more than {self.position:,} tokens"
        return None


Seconds = Callable[[StepWork], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A device: what its steps take, and how sure that is."""

    name: str
    about: str  # what was recorded, or how it was estimated
    caps: ExecutorCaps
    host: HostTimes = HostTimes()
    num_layers: int = 1  # that a step may stop between
    block_size: int = 16
    num_blocks: int | None = None  # of KV, as the engine reported them
    largest: Largest | None = None  # None: an estimate for any shape
    costs: Sequence[Sequence[float]] = ()  # the best first, then others
    noise: tuple[Slowness, Slowness] | None = None  # of steps without prefill, and with it
    estimate: Seconds | None = None  # instead of costs
    estimate_factor: float = 1.0  # that real steps are within of it, nine times of ten

    @property
    def is_estimate(self) -> bool:
        return self.estimate is not None

    def device(self, seed: int) -> ModelDevice:
        """The device in one run: with costs and a moment of the recording drawn by this seed."""
        rng = random.Random(f"device {seed}")
        seconds = self._seconds(rng)
        launches = _launches(self.caps, self.host, rng)
        if self.noise is None:
            return ModelDevice(seconds, num_layers=self.num_layers, launches=launches)
        decodes, mixed = self.noise
        return ModelDevice(seconds, decodes.noise(rng), self.num_layers, launches, mixed.noise(rng))

    def _seconds(self, rng: random.Random) -> Seconds:
        if self.estimate is None:
            return DenseFit(self.caps, rng.choice(self.costs[1:] or self.costs)).seconds
        estimate, factor = self.estimate, math.exp(rng.gauss(0.0, math.log(self.estimate_factor) / 1.645))
        return lambda work: factor * estimate(work)

    # ---- files ----

    def as_json(self) -> dict[str, Any]:
        assert self.largest is not None
        caps = asdict(self.caps)
        return {
            "version": VERSION,
            "name": self.name,
            "about": self.about,
            "caps": caps,
            "host": [self.host.schedule_s, self.host.output_s, *(one.as_json() for one in self.host.launches)],
            "num_layers": self.num_layers,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "largest": asdict(self.largest),
            "costs": [[float(f"{cost:.4g}") for cost in costs] for costs in self.costs],
            "noise": None if self.noise is None else [one.as_json() for one in self.noise],
        }

    def write(self, path: Path) -> None:
        path.write_bytes(gzip.compress(json.dumps(self.as_json(), separators=(",", ":")).encode(), mtime=0))

    @classmethod
    def from_json(cls, content: Any) -> StepTimes:
        if not isinstance(content, Mapping) or content.get("version") != VERSION:
            raise ValueError(f"not step times of version {VERSION}")
        caps, noise = content["caps"], content["noise"]
        schedule_s, output_s, *launches = content["host"]
        decodes, mixed, launched = map(Launches.from_json, launches)
        waves = caps["attention_waves"]
        costs = [[float(cost) for cost in one] for one in content["costs"]]
        if not costs or any(len(one) != NUM_FIGURES for one in costs):
            raise ValueError(f"expected lists of {NUM_FIGURES} costs")
        found = dict(caps) | {
            "row_buckets": tuple(caps["row_buckets"]),
            "attention_waves": None if waves is None else AttentionWaves(*waves),
        }
        return cls(
            name=str(content["name"]),
            about=str(content["about"]),
            caps=ExecutorCaps(**found),
            host=HostTimes(float(schedule_s), float(output_s), (decodes, mixed, launched)),
            num_layers=content["num_layers"],
            block_size=content["block_size"],
            num_blocks=content["num_blocks"],
            largest=Largest(**content["largest"]),
            costs=costs,
            noise=None if noise is None else (Slowness.from_json(noise[0]), Slowness.from_json(noise[1])),
        )


def _launches(caps: ExecutorCaps, host: HostTimes, rng: random.Random) -> Callable[[StepWork, float], float]:
    most = caps.row_buckets[-1] if caps.row_buckets else math.inf
    decodes, mixed, launched = (one.seconds(rng) for one in host.launches)
    return lambda work, at: (launched if work.num_rows > most else mixed if work.chunks else decodes)(work, at)


def shipped() -> list[str]:
    """Names of the files in the package."""
    folder = resources.files("evenflow.simulation") / _FOLDER
    return sorted(file.name.removesuffix(".json.gz") for file in folder.iterdir() if file.name.endswith(".json.gz"))


def find_step_times(name: str) -> StepTimes | None:
    """A shipped file by its name, or a file of the user; None if there is neither. InvalidInput for a broken one."""
    if name in shipped():
        content = (resources.files("evenflow.simulation") / _FOLDER / f"{name}.json.gz").read_bytes()
    elif (path := Path(name)).is_file():
        content = path.read_bytes()
    else:
        return None
    try:
        return StepTimes.from_json(json.loads(gzip.decompress(content)))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise InvalidInput(f"Got --device {name!r} but it is no file of step times: {error}.") from error


def estimated(gpu: str, work: ModelWork, heads: tuple[int, int], model: str) -> StepTimes:
    """A roofline of a GPU by its name. Nothing was measured."""
    device = known_device(gpu)
    if device is None:
        names = ", ".join([*shipped(), *DEVICES])
        raise InvalidInput(f"Got --device {gpu!r} but it is unknown: give a file of step times, or one of {names}.")
    waves = attention_waves(*heads, device, WaveKernel.FLASH_ATTENTION_3)
    costs = roofline(work, device, waves)
    caps = ExecutorCaps(_GPU_STEPS_IN_FLIGHT, _MANY_CHUNKS, attention_waves=waves)
    return StepTimes(
        name=gpu,
        about=f"an ESTIMATE: a roofline of {model} from {gpu}'s data sheet, nothing was measured; real steps are "
        f"within about {_ROOFLINE_FACTOR:g} times of it; pauses and the host's time are missing",
        caps=caps,
        estimate=lambda work: costs.seconds(figures_of(work.shape(caps))),
        estimate_factor=_ROOFLINE_FACTOR,
    )
