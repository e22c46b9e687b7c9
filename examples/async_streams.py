"""Two chats stream beside a long prompt, under a latency target that changes while they run.

Run: python examples/async_streams.py [MODEL [SENTENCES]]
"""

from __future__ import annotations

import asyncio
import sys
from itertools import pairwise

from evenflow import AsyncLLM, SamplingParams

QUESTIONS = ("Why is the sky blue?", "Write a short poem about rain.")
SENTENCE = "The quick brown fox jumps over the lazy dog. "


async def ask(llm: AsyncLLM, name: str, question: str) -> None:
    prompt = llm.encode_chat([{"role": "user", "content": question}])  # as the model was trained to be asked
    answer = ""
    async for delta in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=24)):
        answer += delta.text
        times = delta.output.token_times_s
    longest_gap = max((after - before for before, after in pairwise(times)), default=0.0)
    print(f"{name}: first token after {times[0]:.2f} s, longest gap {longest_gap:.2f} s: {answer!r}")


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "default"
    long_question = SENTENCE * int(sys.argv[2] if len(sys.argv) > 2 else 100) + "Which animal jumps?"
    async with AsyncLLM(model, tbt_target=0.2) as llm:
        chats = [asyncio.create_task(ask(llm, f"chat {n}", question)) for n, question in enumerate(QUESTIONS, 1)]
        long = asyncio.create_task(ask(llm, "long", long_question))
        llm.set_target(0.4)  # from the next step on
        await asyncio.gather(*chats, long)


if __name__ == "__main__":
    asyncio.run(main())
