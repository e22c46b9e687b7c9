"""The engine is killed again and again under load: every request ends whole or is told, and the accounts add up.

    python benchmarks/kill_soak.py --model PATH [--streams 50] [--every 20] [--seconds 300] [--json PATH]

Each client sends one request after another, four of five streamed. Every `--every` seconds the engine process gets
`kill -9`. In the end the server's request log must agree with what the clients saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from server_soak import Served, events_of, random_body, running_server

from evenflow.server.metrics.request_accounts import Accounts, read_accounts

_WHOLE, _TOLD, _REFUSED, _LOST = "whole", "told in the stream", "answered 503", "lost"
_BACK_OFF_S = 0.2
_STREAMED_SHARE = 0.8


async def send_one(address: str, body: dict[str, Any]) -> str:
    """Send a request; returns what came of it."""
    last, status = b"", b""
    async with events_of(address, body) as lines:
        async for line in lines:
            status = status or line
            if line.startswith(b'{"id"') and b" 200 " in status:
                return _WHOLE
            if line.startswith(b"data: "):
                last, before = line, last
                if line.startswith(b"data: [DONE]"):
                    return _TOLD if b'"error"' in before else _WHOLE
    return _REFUSED if b" 503 " in status else f"{_LOST}: {(status + last)[:200]!r}"


async def keep_sending(address: str, seed: int, until: float, seen: Counter[str]) -> None:
    source = random.Random(seed)
    while time.monotonic() < until:
        try:
            body = random_body(source)
            if source.random() > _STREAMED_SHARE:
                body |= {"stream": False, "stream_options": None}
            outcome = await send_one(address, body)
        except OSError as error:
            outcome = f"{_LOST}: {error}"
        seen[outcome] += 1
        if outcome == _REFUSED:
            await asyncio.sleep(_BACK_OFF_S)


async def keep_killing(server: Served, every_s: float, until: float) -> int:
    """`kill -9` to the engine, whenever that time has passed and it is up; returns how often."""
    num_kills = 0
    async with httpx.AsyncClient(base_url=server.address, timeout=30) as client:
        while time.monotonic() + every_s < until:
            await asyncio.sleep(every_s)
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.1)
            pids = re.findall(r"engine starts in process (\d+)", server.log.read_text())
            os.kill(int(pids[-1]), signal.SIGKILL)
            num_kills += 1
    return num_kills


async def soak(server: Served, options: argparse.Namespace) -> tuple[Counter[str], int]:
    until, seen = time.monotonic() + options.seconds, Counter[str]()
    clients = [asyncio.create_task(keep_sending(server.address, seed, until, seen)) for seed in range(options.streams)]
    num_kills = await keep_killing(server, options.every, until)
    await asyncio.gather(*clients)
    return seen, num_kills


def disagreements(seen: Counter[str], accounts: Accounts) -> list[str]:
    """Of the clients and the log. A 503 may come before a request is accepted, or after the engine died twice."""
    wrong = list(accounts.problems) + [f"{count} times: {what}" for what, count in seen.items() if _LOST in what]
    if not accounts.adds_up or accounts.still_open or accounts.cut_off:
        wrong.append("the accounts of the request log do not add up")
    if seen[_WHOLE] != accounts.ended["length"]:
        wrong.append(f"{seen[_WHOLE]} whole answers but the log has {accounts.ended['length']}")
    if not seen[_TOLD] <= accounts.ended["error"] <= seen[_TOLD] + seen[_REFUSED]:
        wrong.append(
            f"{seen[_TOLD]} were told and {seen[_REFUSED]} got 503, the log has {accounts.ended['error']} errors"
        )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "requests.jsonl")
        with running_server(options.model, "64MiB", "--request-log", str(log)) as server:
            seen, num_kills = asyncio.run(soak(server, options))
        accounts = read_accounts([log])
    print(f"{num_kills} kills in {options.seconds:.0f} s under {options.streams} streams")
    print("  clients: " + ", ".join(f"{count} {what}" for what, count in sorted(seen.items())))
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(accounts.ended.items()))
    print(f"  log: {accounts.num_accepted} accepted, {accounts.num_retries} begun again, ended: {ended}")
    wrong = disagreements(seen, accounts)
    print("\n".join(f"FAILED {line}" for line in wrong) or "The accounts add up.")
    if options.json is not None:
        options.json.write_text(json.dumps({"kills": num_kills, "clients": seen, "log": accounts.as_json()}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
