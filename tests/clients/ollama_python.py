"""The official Python client of Ollama's API."""

from __future__ import annotations

import asyncio

import ollama
from checking import ADDRESS, MODEL, check, raised, run_checks

CLIENT = ollama.Client(host=ADDRESS, timeout=120)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 12}


@check
def a_chat_is_answered() -> None:
    answer = CLIENT.chat(MODEL, messages=QUESTION, options=GREEDY)
    assert "Paris" in answer.message.content
    assert answer.done
    assert answer.done_reason in ("stop", "length")
    assert 0 < answer.eval_count <= 12
    assert answer.prompt_eval_count > 5
    assert answer.total_duration > 0


@check
def a_chat_is_streamed() -> None:
    parts = list(CLIENT.chat(MODEL, messages=QUESTION, options=GREEDY, stream=True))
    assert len(parts) > 3
    assert "Paris" in "".join(part.message.content for part in parts)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert CLIENT.chat(MODEL, messages=QUESTION, options=GREEDY).message.content == "".join(
        part.message.content for part in parts
    )


@check
def a_text_is_generated() -> None:
    whole = CLIENT.generate(MODEL, prompt="The capital of France is", raw=True, options=GREEDY)
    parts = CLIENT.generate(MODEL, prompt="The capital of France is", raw=True, options=GREEDY, stream=True)
    assert whole.response == "".join(part.response for part in parts) != ""
    assert CLIENT.generate(MODEL, prompt="Hello", system="Be brief.", options=GREEDY).response
    assert CLIENT.generate(MODEL).done_reason == "load"


@check
def a_schema_constrains_the_text() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    answer = CLIENT.chat(MODEL, messages=QUESTION, format=schema | {"additionalProperties": False})
    assert answer.message.content.replace(" ", "").replace("\n", "").startswith('{"n":')
    assert CLIENT.generate(MODEL, prompt="Some JSON", format="json", options=GREEDY).response.lstrip()[0] in "{["


@check
def tools_are_taken_and_results_are_read() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: the other
        """
        return a + b

    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    answer = CLIENT.chat(MODEL, messages=messages, tools=[add], options=GREEDY)
    assert answer.message.role == "assistant"
    called = {"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    turns = [{"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_name": "add", "content": "7"}]
    assert CLIENT.chat(MODEL, messages=messages + turns, tools=[add], options=GREEDY).eval_count > 0


@check
def models_are_listed_and_shown() -> None:
    assert MODEL in [one.model for one in CLIENT.list().models]
    about = CLIENT.show(MODEL)
    assert "completion" in about.capabilities
    assert about.modelinfo["evenflow.context_length"] > 0
    assert CLIENT.ps().models[0].model == MODEL


@check
def errors_have_their_class_and_status() -> None:
    missing = raised(ollama.ResponseError, lambda: CLIENT.chat("other", messages=QUESTION))
    assert missing.status_code == 404
    assert "other" in missing.error
    wrong = raised(ollama.ResponseError, lambda: CLIENT.chat(MODEL, messages=QUESTION, options={"num_predict": 0}))
    assert (wrong.status_code, "num_predict" in wrong.error) == (400, True)
    assert raised(ollama.ResponseError, lambda: CLIENT.pull("x")).status_code == 404


@check
def many_at_once_are_all_answered() -> None:
    async def main() -> None:
        client = ollama.AsyncClient(host=ADDRESS, timeout=120)

        async def one(number: int) -> int:
            messages = [{"role": "user", "content": f"Count from {number}"}]
            count = 0
            async for part in await client.chat(MODEL, messages=messages, options={"num_predict": 5}, stream=True):
                count = part.eval_count or count
            return count

        assert all(await asyncio.gather(*(one(number) for number in range(16))))

    asyncio.run(main())


@check
def a_stream_that_is_closed_early_ends() -> None:
    parts = CLIENT.chat(MODEL, messages=QUESTION, options={"num_predict": 500}, stream=True)
    next(parts)
    parts.close()


run_checks()
