"""GET /v1/requests/{id}/chunks: how a request was served, its prompt chunk by chunk, while it runs and afterwards.

It reads what the Observer recorded, so it is the same for evenflow's own engine and for a host engine.
"""

from __future__ import annotations

import re
from collections import deque
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request, Response

from evenflow.server.access import Caller
from evenflow.server.api import response_models as models
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.openapi import described
from evenflow.server.errors import ApiError
from evenflow.server.metrics.observer import Listener, Observer, ServedRequest

MAX_FINISHED = 1024  # requests that are kept after their end
_MAX_CHUNKS = 1 << 16  # of all of them: a long prompt beside many streams may have thousands
# What engines add to a response's id to name its requests: the number of the choice or prompt, before the id for the
# choices in vLLM, and a random end in vLLM.
_REQUEST_ID = r"(?:(\d{{1,9}})_)?{}(?:[-_](\d{{1,9}}))?(?:-[0-9a-f]{{8}})?"


class RecentRequests(Listener):
    """The requests that are open, and the last ones that ended."""

    def __init__(self, observer: Observer) -> None:
        self._open = observer.requests
        self._finished: deque[ServedRequest] = deque()
        self._num_chunks = 0
        observer.listen(self)

    def on_request_finished(self, record: ServedRequest) -> None:
        self._finished.append(record)
        self._num_chunks += len(record.chunks)
        while len(self._finished) > MAX_FINISHED or self._num_chunks > _MAX_CHUNKS:
            self._num_chunks -= len(self._finished.popleft().chunks)

    def find(self, response_id: str, caller: Caller) -> list[ServedRequest]:
        """The requests of this caller's response, one per choice, in the order of the choices."""
        pattern = re.compile(_REQUEST_ID.format(re.escape(response_id)))
        found = [
            (int(match[2] or 0), int(match[1] or 0), record)
            for record in chain(self._finished, self._open.values())
            if (match := pattern.fullmatch(record.request_id)) is not None
            and (caller.is_admin or caller.name == record.key)
        ]
        return [record for *_, record in sorted(found, key=lambda one: one[:2])]


def request_routes(recent: RecentRequests) -> APIRouter:
    routes = APIRouter()

    @routes.get(
        "/v1/requests/{request_id:path}/chunks",
        summary="How a request was served: its prompt's chunks, and its late tokens",
        **described(models.RequestChunks, errors=(404,)),
    )
    async def request_chunks(request_id: str, request: Request) -> Response:
        records = recent.find(request_id, request.state.caller)
        if not records:
            message = (
                f"No request of yours with the id {request_id!r} is open or among the last {MAX_FINISHED} that ended; "
                "expected the id of a response."
            )
            raise ApiError(404, message, code="request_not_found", param="request_id")
        content = {"id": request_id, "object": "request.chunks", "requests": [_life(record) for record in records]}
        return Response(encode_json(content), media_type="application/json")

    return routes


def _life(record: ServedRequest) -> dict[str, Any]:
    has_ended = bool(record.finish_reason)

    def since_arrival(at: float | None) -> float | None:
        return None if at is None else round(at - record.started_at, 6)

    return {
        "id": record.request_id,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "queue_s": since_arrival(record.admitted_at),
        "ttft_s": since_arrival(record.first_token_at),
        "chunks": [
            {
                "start": chunk.start,
                "length": chunk.length,
                "reason": chunk.reason,
                "seconds": round(chunk.seconds, 6),
                "end_s": since_arrival(at),
            }
            for at, chunk in record.chunks
        ],
        "late": [
            {
                "at_s": since_arrival(stall.at),
                "gap_s": round(stall.gap_s, 6),
                "late_s": round(stall.late_s, 6),
                "causes": [  # without the other requests' ids
                    {"kind": cause.kind, "seconds": round(cause.seconds, 6), "tokens": cause.num_tokens}
                    for cause in stall.causes
                ],
            }
            for stall in sorted(record.late, key=lambda one: one.at)
        ],
        "output_tokens": record.num_output_tokens if has_ended else None,
        "finish_reason": record.finish_reason or None,
        "end_s": since_arrival(record.finished_at) if has_ended else None,
    }
