"""/v1/completions through the official client and as plain HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from evenflow.engine.client import Stream
from evenflow.executors.fake import fake_continuation
from tests.models import tiny_llama
from tests.server.engines import VOCAB_SIZE
from tests.server.serving import MODEL, RunningServer, model_server, scripted_server, small_tokenizer

SCRIPT = "Hello, wörld 😀! the end"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(script=SCRIPT) as running:
        yield running


@pytest.fixture(scope="module")
def noise() -> Iterator[RunningServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture(scope="module")
def llama() -> Iterator[RunningServer]:
    with model_server(str(tiny_llama())) as running:
        yield running


def num_tokens(text: str) -> int:
    return len(small_tokenizer().encode(text, add_special_tokens=False))


def test_the_openai_client_gets_a_whole_answer(server: RunningServer) -> None:
    answer = server.openai().completions.create(model=MODEL, prompt="hi", max_tokens=num_tokens(SCRIPT))
    assert answer.choices[0].text == SCRIPT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == num_tokens(SCRIPT)
    assert answer.usage.prompt_tokens == num_tokens("hi") + 1  # the model's first token


def test_the_openai_client_streams_characters_of_several_tokens_whole(server: RunningServer) -> None:
    stream = server.openai().completions.create(
        model=MODEL, prompt="hi", max_tokens=num_tokens(SCRIPT), stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == SCRIPT
    assert "�" not in "".join(chunk.choices[0].text for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.usage is not None
    assert last.usage.completion_tokens == num_tokens(SCRIPT)


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(server: RunningServer) -> None:
    for stop in ("d 😀", ["nothing", "rld 😀! t"], "wörld"):
        body = {"prompt": "hi", "max_tokens": 100, "stop": stop}
        wanted = SCRIPT[: SCRIPT.index(stop if isinstance(stop, str) else stop[1])]
        [choice] = server.post("/v1/completions", body).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
        events = server.events("/v1/completions", body)
        assert "".join(event["choices"][0]["text"] for event in events) == wanted
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
    server.until(lambda: server.client.num_open == 0)


def test_min_tokens_hold_a_stop_string_back(server: RunningServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, prompt in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", chat)):
        answer = server.post(path, {**prompt, "max_tokens": 100, "stop": SCRIPT[1:3], "min_tokens": 8}).json()
        assert answer["usage"]["completion_tokens"] > 8
        choice = answer["choices"][0]
        assert (choice["text"] if "text" in choice else choice["message"]["content"]).startswith(SCRIPT[:3])


def test_a_stop_token_ends_the_answer_and_is_no_text(server: RunningServer) -> None:
    token = small_tokenizer().encode(SCRIPT, add_special_tokens=False)[3]
    body = {"prompt": "hi", "max_tokens": 100, "stop_token_ids": [token]}
    answer = server.post("/v1/completions", body).json()
    before = small_tokenizer().decode(small_tokenizer().encode(SCRIPT, add_special_tokens=False)[:3])
    assert answer["choices"][0]["text"] == before
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4


def test_a_stop_is_part_of_the_text_if_asked_for(server: RunningServer) -> None:
    tokens = small_tokenizer().encode(SCRIPT, add_special_tokens=False)
    upto_token = small_tokenizer().decode(tokens[:4])
    upto_stop = SCRIPT[: SCRIPT.index("!") + 1]
    stops = {"stop": ["d 😀!", "nothing"]}, {"stop_token_ids": [tokens[3]]}
    for stop, wanted in zip(stops, (upto_stop, upto_token), strict=True):
        body = {"max_tokens": 100, "include_stop_str_in_output": True, **stop}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, prompt in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", chat)):
            [choice] = server.post(path, {**prompt, **body}).json()["choices"]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert (text, choice["finish_reason"]) == (wanted, "stop")
        events = server.events("/v1/completions", {"prompt": "hi", **body})
        assert "".join(event["choices"][0]["text"] for event in events) == wanted


def test_control_tokens_are_text_if_asked_for() -> None:
    said = "one<|im_start|> two<|end|>"
    with scripted_server(script=said) as server:
        for skips, text in ((True, "one two"), (False, "one<|im_start|> two")):
            body = {"max_tokens": 50, "skip_special_tokens": skips, "logprobs": 1, "echo": True}
            [choice] = server.post("/v1/completions", {"prompt": [3, *map(ord, "a")], **body}).json()["choices"]
            assert choice["text"].endswith(text)
            prompt = small_tokenizer().decode([3, *map(ord, "a")], skip_special_tokens=skips)
            assert choice["text"] == prompt + text
            assert choice["logprobs"]["text_offset"][-1] == len(prompt + text)
            chat = {"messages": [{"role": "user", "content": "hi"}], "skip_special_tokens": skips}
            message = server.post("/v1/chat/completions", chat).json()["choices"][0]["message"]
            assert message["content"] == text
        asked = {"prompt": "hi", "max_tokens": 50, "skip_special_tokens": False, "include_stop_str_in_output": True}
        assert server.post("/v1/completions", asked).json()["choices"][0]["text"] == said


def test_batches_of_texts_and_of_token_ids_answer_in_order(noise: RunningServer) -> None:
    prompts = [[5, 6, 7], [8, 9], [10]]
    answer = noise.post("/v1/completions", {"prompt": prompts, "max_tokens": 6, "n": 2}).json()
    tokenizer = small_tokenizer()
    wanted = [tokenizer.decode(fake_continuation(prompt, 6, VOCAB_SIZE)) for prompt in prompts for _ in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 36


def test_several_answers_stream_side_by_side(noise: RunningServer) -> None:
    events = noise.events("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 20, "n": 2})
    texts = ["", "", "", ""]
    reasons: list[str] = []
    for event in events:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    tokenizer = small_tokenizer()
    wanted = [tokenizer.decode(fake_continuation(prompt, 20, VOCAB_SIZE)) for prompt in ([5, 6, 7], [8, 9])]
    assert texts == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert reasons == ["length"] * 4


def test_cached_tokens_are_reported_and_belong_to_their_tenant(noise: RunningServer) -> None:
    prompt = list(range(100, 180))

    def cached(**fields: object) -> int:
        answer = noise.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, **fields}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() == 64
    assert cached(tenant="another") == 0
    assert cached(tenant="another") == 64


def test_usage_can_be_said_with_every_chunk(server: RunningServer) -> None:
    body = {"prompt": "hi", "max_tokens": 5, "stream_options": {"continuous_usage_stats": True}}
    events = server.events("/v1/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_echo_with_logprobs_and_no_answer_scores_a_prompt(llama: RunningServer) -> None:
    """What evaluation harnesses ask for to get the likelihood of a text."""
    prompt = [5, 17, 200, 33, 8]
    body = {"prompt": [prompt, [9, 4]], "max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}
    answer = llama.post("/v1/completions", body).json()
    first = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == 0
    assert first["text"] == "".join(first["logprobs"]["tokens"])
    assert first["logprobs"]["token_logprobs"][0] is None
    assert first["logprobs"]["top_logprobs"][0] is None
    assert len(first["logprobs"]["token_logprobs"]) == len(prompt)
    for logprob, top in zip(
        first["logprobs"]["token_logprobs"][1:], first["logprobs"]["top_logprobs"][1:], strict=True
    ):
        assert logprob <= max(top.values()) < 0
        assert len(top) in (2, 3)


def test_echo_with_one_token_adds_it_behind_the_prompt(llama: RunningServer) -> None:
    body = {"prompt": [5, 17, 200], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    whole = llama.post("/v1/completions", body).json()["choices"][0]
    alone = llama.post("/v1/completions", {**body, "echo": False}).json()["choices"][0]
    assert len(whole["logprobs"]["tokens"]) == 4
    assert whole["logprobs"]["tokens"][-1] == alone["logprobs"]["tokens"][0]
    assert math.isclose(whole["logprobs"]["token_logprobs"][-1], alone["logprobs"]["token_logprobs"][0], rel_tol=1e-4)
    assert whole["text"].endswith(alone["text"])
    offsets = whole["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    streamed = llama.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in streamed) == whole["text"]
    *parts, last = [event["choices"][0] for event in streamed]
    assert [token for part in parts for token in part["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]
    assert (last["text"], last["logprobs"], last["finish_reason"]) == ("", None, "length")


def test_prompt_logprobs_by_token_id(llama: RunningServer) -> None:
    body = {"prompt": [5, 17, 200], "max_tokens": 1, "prompt_logprobs": 1}
    rows = llama.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert "17" in rows[1]
    assert "200" in rows[2]
    assert any(entry["rank"] == 1 for entry in rows[1].values())


def test_a_seed_repeats_and_gives_each_answer_its_own(llama: RunningServer) -> None:
    body = {"prompt": "the", "max_tokens": 12, "n": 2, "seed": -7, "ignore_eos": True}
    first, second = (llama.post("/v1/completions", body).json()["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in second]
    assert first[0]["text"] != first[1]["text"]


def test_a_large_echo_is_not_lost_in_the_stream_that_goes_on(llama: RunningServer) -> None:
    """It is written on a thread, one at a time, while the engine adds tokens to the outputs."""
    prompt = [5 + number % 200 for number in range(150)]
    body = {"prompt": prompt, "n": 6, "seed": 3, "max_tokens": 20, "echo": True, "logprobs": 20, "ignore_eos": True}
    body["return_token_ids"] = True
    whole = llama.post("/v1/completions", body).json()["choices"]
    found: list[dict[str, Any]] = [{"text": "", "prompt_token_ids": [], "token_logprobs": []} for _ in whole]
    for event in llama.events("/v1/completions", body):
        for choice in event["choices"]:
            one = found[choice["index"]]
            one["text"] += choice["text"]
            one["prompt_token_ids"] += choice.get("prompt_token_ids", [])
            one["token_logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
    for one, expected in zip(found, whole, strict=True):
        assert one["text"] == expected["text"]
        assert one["prompt_token_ids"] == prompt
        assert len(one["token_logprobs"]) == len(prompt) + 20


def test_min_tokens_and_ignore_eos_keep_an_answer_going(llama: RunningServer) -> None:
    answer = llama.post("/v1/completions", {"prompt": "the", "max_tokens": 30, "min_tokens": 30}).json()
    assert answer["usage"]["completion_tokens"] == 30


def test_a_failed_request_says_so_and_the_others_go_on() -> None:
    with scripted_server(poison=77) as running:
        for stream in (False, True):  # before the first token, a stream's status can still say it
            response = running.post("/v1/completions", {"prompt": [77, 5], "max_tokens": 4, "stream": stream})
            assert response.status_code == 500
            assert "poison" in response.json()["error"]["message"]
        assert running.post("/v1/completions", {"prompt": [5], "max_tokens": 4}).status_code == 200


def test_text_offsets_count_characters_even_of_tokens_that_are_parts_of_one() -> None:
    """Before, each part of a character counted as one."""
    text = "aé€ 😀b"
    with scripted_server(script=text) as running:
        num_tokens = len(small_tokenizer().encode(text, add_special_tokens=False))
        assert num_tokens > len(text)
        for prompt in ("naïve 😀", small_tokenizer().encode("naïve 😀")):
            for echo in (False, True):
                body = {"prompt": prompt, "max_tokens": num_tokens, "logprobs": 0, "echo": echo}
                (choice,) = running.post("/v1/completions", body).json()["choices"]
                written = choice["text"]
                assert written == "naïve 😀" * echo + text
                check_offsets(written, choice["logprobs"])
                events = running.events("/v1/completions", body)
                parts = [event["choices"][0]["logprobs"] or {"tokens": [], "text_offset": []} for event in events]
                joined = {name: [one for part in parts for one in part[name]] for name in ("tokens", "text_offset")}
                assert joined == {name: choice["logprobs"][name] for name in joined}


def check_offsets(text: str, logprobs: dict[str, Any]) -> None:
    """A token that is whole characters is the text at its offset; offsets never fall."""
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] < len(text)
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if "\ufffd" not in token and token != "<|begin|>":
            assert text.startswith(token, offset)


def test_tokens_that_nobody_sees_singly_are_not_merged(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each token of a choice that waited for its turn to be read copied all tokens before it."""
    pushed = []
    push = Stream.push
    monkeypatch.setattr(Stream, "push", lambda self, delta: pushed.append(delta) or push(self, delta))
    response = server.post("/v1/completions", {"prompt": "a", "n": 4, "max_tokens": 40, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 160
    assert len(pushed) == 4
