"""What the server costs per token: throughput, time from a step's end to the client, and CPU time.

    python benchmarks/server_overhead.py

The executor computes nothing and finishes a step at every tick of a clock, with a token for every stream. Server,
engine and client are three processes; the client has a plain socket per stream. A server that cannot keep up merges
tokens into fewer events and its latency grows: it does not sustain a load with less than one event per token.
To compare with another checkout, set PYTHONPATH to its `src`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tokenizers
import uvloop
from tokenizers import decoders
from tokenizers.models import BPE

from evenflow.core.plan import StepPlan, StepResult
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Limits
from evenflow.executors.fake import FakeExecutor
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.serving import Server, ServerSettings, bind, serve

_NUM_WORDS = 900
_MAX_MODEL_LEN = 20_000


def word_tokenizer() -> Tokenizer:
    """Every token is a word of four characters and a space."""
    backend = tokenizers.Tokenizer(BPE({f"Ġw{number:03}": number for number in range(_NUM_WORDS)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, bos_token_id=None, eos_token_ids=(), chat_template=None)


class TickingExecutor(FakeExecutor):
    """Finishes a step at every tick, and logs when each request got its tokens."""

    def __init__(self, period_s: float, log: Path) -> None:
        super().__init__(vocab_size=_NUM_WORDS)
        self._period_s = period_s
        self._next_tick = 0.0
        self._log = log
        self._token_times: defaultdict[str, list[float]] = defaultdict(list)

    def wait(self) -> StepResult:
        plan: StepPlan = self._queue[0][0]
        result = super().wait()
        self._next_tick = max(self._next_tick + self._period_s, time.perf_counter() - self._period_s)
        time.sleep(max(0.0, self._next_tick - time.perf_counter()))
        now = time.perf_counter()
        for request_id in plan.decodes.request_ids:
            self._token_times[request_id].append(now)
        for chunk in plan.chunks:
            if chunk.samples:
                self._token_times[chunk.request_id].append(now)
        return result

    def close(self) -> None:
        self._log.write_text(json.dumps({"token_times": self._token_times, "cpu_s": time.process_time()}))


def ticking_engine(period_s: float, num_streams: int, log: Path) -> Engine:
    config = SchedulerConfig(num_blocks=num_streams * _MAX_MODEL_LEN // 16, max_num_seqs=num_streams)
    executor = TickingExecutor(period_s, log)
    return Engine(Scheduler(config, executor.caps), executor, Limits(_MAX_MODEL_LEN, _NUM_WORDS))


def run_server(port: int, period_s: float, num_streams: int, log: Path) -> None:
    settings = ServerSettings(model_names=("words",), port=port)
    factory = partial(ticking_engine, period_s, num_streams, log)
    began = [0.0]

    def on_ready(server: Server) -> None:
        gc.collect()
        gc.freeze()  # as `evenflow serve` does
        began[0] = time.process_time()

    with bind("127.0.0.1", port) as listener:
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(
            serve(settings, listener, factory, word_tokenizer, on_ready)
        )
    log.with_suffix(".front").write_text(str(time.process_time() - began[0]))


@dataclass
class StreamReader(asyncio.Protocol):
    """One stream: sends its request and records when each token arrives."""

    body: bytes
    request_id: str = ""
    token_times: list[float] = field(default_factory=list)
    num_events: int = 0
    done: asyncio.Future[None] = field(init=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert hasattr(transport, "write")
        self.done = asyncio.get_running_loop().create_future()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(self.body)}\r\n"
        transport.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + self.body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.request_id and (at := data.find(b'"id":"')) >= 0:
            self.request_id = data[at + 6 : data.index(b'"', at + 6)].decode()
        self.token_times += [now] * data.count(b" w")
        self.num_events += data.count(b'"text":')
        if b"[DONE]" in data:
            self.done.set_result(None)


def run_client(port: int, num_streams: int, num_tokens: int, results: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        readers = []
        for number in range(num_streams):
            body = {"prompt": [number] * 8, "max_tokens": num_tokens, "stream": True}
            reader = StreamReader(json.dumps(body).encode())
            await loop.create_connection(partial(lambda reader: reader, reader), "127.0.0.1", port)
            readers.append(reader)
        await asyncio.gather(*(reader.done for reader in readers))
        results.write_text(json.dumps([(r.request_id, r.token_times, r.num_events) for r in readers]))

    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


def measure(rate: float, num_streams: int, seconds: float) -> dict[str, float]:
    """Offer `rate` tokens per second in total, and measure what arrives."""
    num_tokens = min(int(seconds * rate / num_streams), _MAX_MODEL_LEN - 100)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        log, results = Path(folder, "engine.json"), Path(folder, "client.json")
        port = free_port()
        server = context.Process(target=run_server, args=(port, num_streams / rate, num_streams, log))
        server.start()
        wait_for(port)
        client = context.Process(target=run_client, args=(port, num_streams, num_tokens, results))
        client.start()
        client.join()
        server.terminate()
        server.join()
        engine = json.loads(log.read_text())
        front_cpu_s = float(log.with_suffix(".front").read_text())
        sent: dict[str, list[float]] = engine["token_times"]
        received: list[tuple[str, list[float], int]] = json.loads(results.read_text())
    latencies = sorted(
        there - here for request_id, times, _ in received for here, there in zip(sent[request_id], times, strict=True)
    )
    total = sum(len(times) for _, times, _ in received)
    began, ended = min(times[0] for _, times, _ in received), max(times[-1] for _, times, _ in received)
    return {
        "received": (total - num_streams) / (ended - began),
        "events_per_token": sum(events for _, _, events in received) / total,
        "p50_ms": 1000 * statistics.median(latencies),
        "p99_ms": 1000 * latencies[int(0.99 * len(latencies))],
        "front_us": 1e6 * front_cpu_s / total,
        "engine_us": 1e6 * engine["cpu_s"] / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="per load")
    parser.add_argument(
        "--loads",
        nargs="+",
        default=["64@20000", "64@30000", "16@5000", "64@5000"],
        help="streams@tokens per second in total",
    )
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores; CPU in microseconds per token, the engine's including its start")
    print("      load received/s events/token  p50 ms  p99 ms  front engine")
    for load in options.loads:
        num_streams, rate = map(int, load.split("@"))
        found = measure(rate, num_streams, options.seconds)
        print(
            f"{load:>10} {found['received']:10.0f} {found['events_per_token']:12.3f} {found['p50_ms']:7.2f} "
            f"{found['p99_ms']:7.2f} {found['front_us']:6.0f} {found['engine_us']:6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
