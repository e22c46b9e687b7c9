"""Stands in for the server of vLLM or SGLang, as a process of its own that is called like it: the same flags and
environment, a few routes, and step reports by the plug-in's real steering. Run by the tests of evenflow's front.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from evenflow.core.plan import ChunkReason, ExecutorCaps
from evenflow.hosts.in_flight import InFlightStep
from evenflow.hosts.policy_file import NO_TARGET
from evenflow.hosts.settings import read_settings
from evenflow.hosts.steering import Decode, Host, HostLoad, HostRequest, Steering

TOKEN_S = 0.01
METRICS = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 0.0\n'


class Scheduler:
    """Every chunk and every token is a step of its own, reported by the plug-in's own steering."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        settings = read_settings({})
        assert settings.target_file is not None
        store = Path(settings.target_file).with_name("step-times")
        self._steering = Steering(Host(ExecutorCaps(), budget, 256, store, logging.getLogger("vllm")), settings)
        self._requests: dict[str, int] = {}

    @property
    def num_running(self) -> int:
        return len(self._requests)

    @property
    def policy(self) -> str:
        return str(self._steering.policy or NO_TARGET)

    def arrive(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        self._requests[request_id] = num_prompt_tokens
        self._steering.add(HostRequest(request_id, time.time(), num_prompt_tokens, num_prompt_tokens, 0, max_tokens))

    def leave(self, request_id: str) -> None:
        del self._requests[request_id]

    def prefill(self, request_id: str, is_whole_answer: bool) -> None:
        num_tokens = self._requests[request_id]
        for start in range(0, num_tokens, self.budget):
            is_end = start + self.budget >= num_tokens
            if is_end and is_whole_answer:
                self.leave(request_id)
            self.step(request_id, (start, min(self.budget, num_tokens - start)), is_end)

    def step(self, request_id: str, chunk: tuple[int, int] | None = None, gives_token: bool = True) -> None:
        self._steering.begin_step()
        now = time.perf_counter()
        self._steering.clock = lambda: now  # type: ignore[method-assign]
        step = InFlightStep(now - TOKEN_S, key=object())
        if chunk is not None:
            step.chunks = [(request_id, *chunk)]
            step.reasons = {request_id: ChunkReason.END_OF_PROMPT} if gives_token else {}
            self._steering.scheduled(step, [], int(gives_token))
        else:
            step.decode_ids = {request_id}
            self._steering.scheduled(step, [Decode(request_id, 1, 1)], 0)
        step = self._steering.ended(step.key)
        tokens = {request_id: [1]} if gives_token else {}
        self._steering.emitted(step, tokens, self._requests, HostLoad(self.num_running, 0, 0.25))


def make_app(names: list[str], budget: int) -> FastAPI:
    app = FastAPI()
    scheduler = Scheduler(budget)
    num_requests = 0
    frozen_after: list[int] = []
    bodies: list[dict[str, Any]] = []  # of requests that generate
    responses: dict[str, dict[str, Any]] = {}
    effects: list[str] = []

    def new_id(body: dict[str, Any]) -> str:
        nonlocal num_requests
        num_requests += 1
        bodies.append(body)
        return f"cmpl-{body.get('request_id', num_requests)}"

    async def tokens(response_id: str, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        request_id = f"{response_id}-0-0a1b2c3d"  # as vLLM names it: the prompt's number, and a random end
        num_prompt_tokens = len(body["prompt"])
        scheduler.arrive(request_id, num_prompt_tokens, body["max_tokens"])
        num_tokens = 0
        try:
            for number in range(body["max_tokens"]):
                await asyncio.sleep(TOKEN_S)
                num_tokens += 1
                is_last = num_tokens == body["max_tokens"]
                if number == 0:
                    scheduler.prefill(request_id, is_last)
                else:
                    if is_last:
                        scheduler.leave(request_id)
                    scheduler.step(request_id)
                yield f"token {number} "
        finally:
            if num_tokens < body["max_tokens"]:
                scheduler.leave(request_id)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"object": "model", "owned_by": "vllm", "max_model_len": 4096}
        return {"object": "list", "data": [{"id": name, **card} for name in names]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(METRICS, media_type="text/plain")

    @app.post("/freeze_gc")
    async def freeze_gc() -> Response:
        frozen_after.append(num_requests)
        return Response()

    @app.post("/seen")
    async def seen(request: Request) -> dict[str, Any]:
        """What arrived, for tests to look at."""
        return {
            "pid": os.getpid(),
            "arguments": sys.argv[1:],
            "headers": dict(request.headers),
            "query": request.url.query,
            "running": scheduler.num_running,
            "num_requests": num_requests,
            "policy": scheduler.policy,
            "frozen_after": frozen_after,  # this many requests
            "bodies": bodies,
            "effects": effects,
            "plugins": [entry.value for entry in entry_points(group="sglang.srt.plugins")],
            "evenflow": str(Path(str(sys.modules["evenflow"].__file__)).parent),
        }

    @app.get("/release_memory_occupation")
    @app.post("/release_memory_occupation")
    async def release() -> Response:
        effects.append("release")
        return Response()

    @app.post("/v1/responses")
    async def respond(request: Request) -> dict[str, Any]:
        body = await request.json()
        bodies.append(body)
        response = {
            "id": body.get("request_id", "resp_0"),
            "object": "response",
            "of": body.get("previous_response_id"),
        }
        responses[response["id"]] = response
        return response

    @app.get("/v1/responses/{response_id}")
    @app.post("/v1/responses/{response_id}/cancel")
    async def stored(response_id: str) -> dict[str, Any]:
        return responses[response_id]

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        return responses.pop(response_id)

    @app.put("/generate")
    @app.post("/generate")
    async def generate(request: Request) -> dict[str, Any]:
        bodies.append(await request.json())
        await asyncio.sleep(TOKEN_S)
        return {"text": "token 0"}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        if "prompt" not in body:
            error = {"message": "no prompt", "type": "BadRequestError", "param": None, "code": 400}
            return Response(json.dumps({"error": error}), 400, media_type="application/json")
        response_id = new_id(body)
        if body.get("stream"):

            async def events() -> AsyncIterator[str]:
                async for text in tokens(response_id, body):
                    chunk = {"id": response_id, "object": "text_completion", "choices": [{"index": 0, "text": text}]}
                    yield f"data: {json.dumps(chunk)}\n\n"
                yield "data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        text = ""
        async with aclosing(tokens(response_id, body)) as parts:
            async for part in parts:
                if await request.is_disconnected():
                    break
                text += part
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
        answer = {"id": response_id, "object": "text_completion", "created": 1, "model": names[0], "choices": [choice]}
        return Response(json.dumps(answer), media_type="application/json")

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("--model", "--model-path")
    parser.add_argument("--uds")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--scheduler-cls")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--tensor-parallel-size", "--tp-size", type=int)
    parser.add_argument("--max-num-batched-tokens", "--chunked-prefill-size", type=int, default=2048)
    parser.add_argument("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--enable-mixed-chunk", action="store_true")
    parser.add_argument("--compilation-config")
    parser.add_argument("--worker-cls")
    args = parser.parse_args()
    if args.fail:
        sys.exit(3)
    address = {"uds": args.uds} if args.uds else {"host": args.host, "port": args.port}
    budget = args.max_num_batched_tokens if args.enable_chunked_prefill else 1 << 20
    uvicorn.run(make_app(args.served_model_name or [args.model], budget), **address, log_level="warning")


if __name__ == "__main__":
    main()
