"""SGLang's own scheduler and batches with a tiny model on a CPU, hooked by the plug-in, on the test's own clock."""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from evenflow.core.policies import PolicySpec
from evenflow.hosts.policy_file import NO_TARGET
from evenflow.hosts.settings import Settings

CHUNK = 512  # SGLang's own budget
ROW_S = 0.0001  # what the clock says of a row
STEP_S = 0.002
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "torch_dtype": "float32",
}


class SeenStep(NamedTuple):
    """A batch that SGLang ran."""

    decodes: list[str]
    chunks: dict[str, tuple[int, int]]  # start and length

    @property
    def num_prefill_tokens(self) -> int:
        return sum(length for _, length in self.chunks.values())


@dataclass
class _Device:
    """A clock, and a device that runs batches one after the other at a fixed speed."""

    now: float = 0.0
    free_at: float = 0.0
    ends: list[float] = field(default_factory=list)  # of all batches

    def run(self, num_rows: int) -> Callable[[], None]:
        """Returns the call that waits for the batch's end."""
        self.free_at = ends_at = max(self.now, self.free_at) + STEP_S + num_rows * ROW_S
        self.ends.append(ends_at)

        def wait() -> None:
            self.now = max(self.now, ends_at)

        return wait


class _Event:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.synchronize = wait


@dataclass
class Driver:
    """Runs SGLang's event loop over a script of arrivals."""

    scheduler: Any
    device: _Device = field(default_factory=_Device)
    steps: list[SeenStep] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def steer(self, target: str | None) -> None:
        from evenflow.sglang.steering import make_steering

        self.scheduler.evenflow = None
        if target is not None:
            policy = None if target == NO_TARGET else PolicySpec.parse(f"target:{target}")
            settings = Settings(policy, None, None)
            self.scheduler.evenflow = make_steering(self.scheduler, settings)
            self.scheduler.evenflow.core.clock = lambda: self.device.now

    def run(self, script: Sequence[Iterable[Any]], *, overlap: bool = True) -> list[SeenStep]:
        """One entry of the script arrives at each turn of the loop, which ends when all requests have."""
        scheduler = self.scheduler
        scheduler.gracefully_exit, scheduler.enable_overlap, scheduler.result_queue = False, overlap, deque()
        scheduler.flush_cache()
        self.steps, self.outputs = [], {}
        arrivals = iter(script)
        idle_turns = 0

        def receive(*_: Any, **__: Any) -> list[Any]:
            nonlocal idle_turns
            new = next(arrivals, None)
            idle_turns = idle_turns + 1 if new is None and scheduler.is_fully_idle() else 0
            scheduler.gracefully_exit = idle_turns > 2
            return list(new or ())

        type(scheduler.request_receiver).recv_requests = receive
        scheduler.run_event_loop()
        return self.steps

    def run_batch(self, run: Callable[..., Any], batch: Any) -> Any:
        """In place of SGLang's `run_batch`: runs it, and has the test's device say when it ended."""
        decoding = (batch.decoding_reqs or []) if batch.forward_mode.is_extend() else batch.reqs
        started = batch.reqs[: len(batch.reqs) - len(decoding)]
        spans = zip(started, batch.prefix_lens or (), batch.extend_lens or (), strict=False)
        chunks = {request.rid: (start, length) for request, start, length in spans}
        self.steps.append(SeenStep([request.rid for request in decoding], chunks))
        for request in batch.reqs:
            self.outputs[request.rid] = request.output_ids
        result = run(batch)
        result.copy_done = _Event(self.device.run(len(decoding) + self.steps[-1].num_prefill_tokens))
        return result


def make_driver(folder: Path, **settings: Any) -> Driver:
    """SGLang's scheduler with a model of random weights. There can be one in a process."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.server_args import PortArgs, ServerArgs

    from evenflow.sglang import steering

    (folder / "config.json").write_text(json.dumps(_MODEL))
    bootstrap._init_cpu_threads_env = lambda *args, **kwargs: None  # one of its kernels
    SchedulerOutputStreamer.stream_output = lambda *args, **kwargs: None  # nobody reads
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_cuda_graph=True,
        chunked_prefill_size=CHUNK,
        max_running_requests=16,
        max_total_tokens=20_000,
        **settings,
    )
    ranks = publish(args)
    driver = Driver(Scheduler(args, PortArgs.init_new(args), *ranks))
    steering.time = SimpleNamespace(time=lambda: driver.device.now)  # requests arrive by the same clock
    run = driver.scheduler.run_batch
    driver.scheduler.run_batch = lambda batch, *args, **kwargs: driver.run_batch(run, batch)
    return driver


def publish(args: Any) -> tuple[Any, ...]:
    """As SGLang's processes begin, in each version. Returns the ranks that its scheduler takes."""
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "SpawnRanks"):  # since 0.5.21
        runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0, gpu_id=0))
        return ()
    if hasattr(runtime_context, "publish"):
        runtime_context.publish(args, role="scheduler")
    return (0, 0, 0, 0, 0, 0, None)


def request(request_id: str, num_tokens: int, max_tokens: int, first_token: int = 0, **more: Any) -> Any:
    """A request as SGLang's tokenizer process sends it. Prompts with different first tokens share no prefix."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    custom_params = more.pop("custom_params", None)
    sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0, ignore_eos=True, custom_params=custom_params)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=request_id,
        input_text="",
        input_ids=array("q", [first_token, *(position % 509 for position in range(1, num_tokens))]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        **{"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, **more},
        token_ids_logprob=None,
        stream=True,
    )
