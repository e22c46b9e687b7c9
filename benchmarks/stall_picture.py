"""Draws the README's plot: four chats decode and a long prompt arrives, first in one piece, then in chunks.

Run: python benchmarks/stall_picture.py docs/images/stall.png
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

from evenflow import LLM, SamplingParams

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CHATS = ["Tell me a story.", "How does rain form?", "Write a poem about the sea.", "What is a computer?"]
LONG_PROMPT_TOKENS = 2000
POLICIES = {"unchunked": "in one piece", "target:400ms": "in chunks for a target of 400 ms"}
TOKENS_BEFORE, TOKENS_AFTER = 8, 8


def run(policy: str, record: Path) -> list[dict[str, Any]]:
    """All recorded steps."""
    with LLM("default", policy=policy, record=record) as llm:
        engine = llm.engine
        chats = [
            llm.prepare(
                llm.encode_chat([{"role": "user", "content": text}]),
                SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True),
            )
            for text in CHATS
        ]
        for chat in chats:
            engine.add(chat)
        while chats[-1].num_output_tokens < TOKENS_BEFORE:
            engine.step()
        words = llm.tokenizer.encode(Path(__file__).with_name("scheduler_cost.py").read_text()) * 3
        long = llm.prepare(words[:LONG_PROMPT_TOKENS], SamplingParams(temperature=0, max_tokens=TOKENS_AFTER))
        engine.add(long)
        while not long.is_finished:
            engine.step()
    return [step for step in map(json.loads, record.read_text().splitlines()) if step.get("event") == "step"]


def draw(axis: Any, steps: list[dict[str, Any]], title: str) -> None:
    origin = next(s["now"] - s["seconds"] for s in steps if _long_chunks(s))
    gaps: dict[str, list[float]] = {}
    for step in steps:
        end = step["now"] - origin
        if _long_chunks(step):
            axis.axvspan(end - step["seconds"], end, color="tab:orange", alpha=0.25, linewidth=0)
        for name in step["plan"]["decodes"]["request_ids"]:
            gaps.setdefault(name, []).append(end)
    chats = sorted(gaps)[: len(CHATS)]
    for row, name in enumerate(chats):
        axis.plot(gaps[name], [row] * len(gaps[name]), "o", markersize=3, color="tab:blue")
    worst = max(b - a for name in chats for a, b in zip(gaps[name], gaps[name][1:], strict=False))
    axis.set_title(f"{title}: longest wait of a chat for a token {worst:.1f} s", loc="left", fontsize=10)
    axis.set_yticks(range(len(chats)), [f"chat {row + 1}" for row in range(len(chats))])
    axis.set_ylim(-0.6, len(chats) - 0.4)


def _long_chunks(step: dict[str, Any]) -> bool:
    return any(chunk["request_id"] == f"request-{len(CHATS)}" for chunk in step["plan"]["chunks"])


def main() -> None:
    figure, axes = plt.subplots(len(POLICIES), 1, figsize=(9, 4.2), sharex=True, layout="constrained")
    with tempfile.TemporaryDirectory() as folder:
        for axis, (policy, title) in zip(axes, POLICIES.items(), strict=True):
            draw(axis, run(policy, Path(folder) / "run.jsonl"), f"A prompt of {LONG_PROMPT_TOKENS} tokens {title}")
    axes[-1].set_xlabel("seconds since the long prompt began (dots: tokens, shaded: prefill)")
    figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "stall.png", dpi=130)


if __name__ == "__main__":
    main()
