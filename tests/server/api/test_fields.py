"""Fields of OpenAI's SDKs and of vLLM on the two endpoints, against what the model itself computes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from evenflow.model.loader import load_model
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.access import cache_salt
from evenflow.server.api.request_models import ChatBody, CompletionBody
from tests.models import byte_level_tokenizer, reference_model, save_tokenizer, tiny_hf_folder, tiny_llama
from tests.server.serving import MODEL, RunningServer, model_server, scripted_server

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = [5, 17, 200, 33, 8]
MESSAGES = [{"role": "user", "content": "the end"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with model_server(str(tiny_llama())) as running:
        yield running


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    with scripted_server(script="Hello, wörld!") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_model(str(tiny_llama())).tokenizer


def complete(server: RunningServer, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}
    response = server.post(COMPLETION, body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: RunningServer, **fields: Any) -> Any:
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    return response.json()


# ---- what may be generated ----


def test_logit_bias_forces_and_forbids(server: RunningServer) -> None:
    client = server.openai()
    for stream in (False, True):
        fields: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "temperature": 0, "logit_bias": {"300": 100}}
        if not stream:
            found = client.completions.create(prompt=PROMPT, **fields).choices[0].text
        else:
            found = "".join(c.choices[0].text for c in client.completions.create(prompt=PROMPT, stream=True, **fields))
        assert found == server.post("/detokenize", {"tokens": [300] * 3}).json()["prompt"]
    first = complete(server)["choices"][0]["token_ids"][0]
    assert complete(server, logit_bias={str(first): -100})["choices"][0]["token_ids"][0] != first


def test_allowed_tokens_and_bad_words_hold_in_chats(server: RunningServer, tokenizer: Tokenizer) -> None:
    [the] = tokenizer.encode_inside(" the")
    found = chat(server, allowed_token_ids=[the, 300], bad_words=["the"], temperature=1, n=3)
    assert [choice["token_ids"] for choice in found["choices"]] == [[300] * 4] * 3
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": 'start: "(" inner ")"\ninner: "x" | "(" inner ")"'},
        {"guided_grammar": 'root ::= "(" inner ")"\ninner ::= "x" | "(" inner ")"'},
        {"structured_outputs": {"grammar": 'start: "(" inner ")"\ninner: "x" | "(" inner ")"'}},
    ],
)
def test_a_context_free_grammar_in_either_notation_holds(server: RunningServer, fields: dict[str, Any]) -> None:
    [choice] = complete(server, max_tokens=200, temperature=1, seed=3, **fields)["choices"]
    depth = choice["text"].index("x")
    assert depth >= 1
    assert choice["text"] == "(" * depth + "x" + ")" * depth


def test_an_ambiguous_grammar_is_stopped_before_its_steps_take_long(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "guided_grammar": 'start: e\ne: e e | e e e | "a"'}
    response = server.post(COMPLETION, {**body, "min_tokens": 190})
    assert response.status_code in (400, 500)  # in its trial or while it runs, depending on the vocabulary
    assert "oo many items" in response.json()["error"]["message"]
    assert complete(server)["choices"][0]["token_ids"]


# ---- best_of ----


def test_best_of_returns_the_likeliest_of_those_that_n_would(server: RunningServer) -> None:
    common = {"temperature": 1.0, "seed": 11, "prompt": [PROMPT, [9, 4]], "ignore_eos": True}
    everything = complete(server, **common, n=5, logprobs=0)
    best = complete(server, **common, best_of=5, n=2)

    def mean(choice: Any) -> float:
        return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])

    for place in range(2):
        ranked = sorted(everything["choices"][5 * place : 5 * place + 5], key=mean, reverse=True)
        found = best["choices"][2 * place : 2 * place + 2]
        assert [choice["token_ids"] for choice in found] == [choice["token_ids"] for choice in ranked[:2]]
        assert all(choice["logprobs"] is None for choice in found)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"] == everything["usage"]  # all that was generated counts


def test_best_of_one_may_stream(server: RunningServer) -> None:
    events = server.events(COMPLETION, {"prompt": PROMPT, "max_tokens": 2, "best_of": 1})
    assert events[-1]["choices"][0]["finish_reason"]


# ---- suffix and reasoning_effort ----


@pytest.mark.slow
def test_models_trained_for_a_suffix_and_for_reasoning_effort_get_them(tmp_path: Path) -> None:
    """A vocabulary with the tokens for filling in, and a template that takes the effort."""
    folder = tiny_hf_folder(tmp_path, "LlamaForCausalLM", vocab_size=520)
    backend = byte_level_tokenizer()
    backend.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    save_tokenizer(backend, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ reasoning_effort }}/{{ enable_thinking }}:{{ messages[0].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    encode = load_model(str(folder)).tokenizer.encode_inside
    with model_server(str(folder)) as running:
        check_infilling(running, encode)
        check_reasoning_effort(running, encode)


def check_infilling(running: RunningServer, encode: Callable[[str], list[int]]) -> None:
    [choice] = complete(running, prompt="the end", suffix=" of it")["choices"]
    ids = complete(running, prompt=[7, 8], suffix="x", add_special_tokens=False)["choices"][0]["prompt_token_ids"]
    plain = complete(running, prompt="the end", suffix="")["choices"][0]["prompt_token_ids"]
    assert choice["prompt_token_ids"] == [1, 512, *encode("the end"), 513, *encode(" of it"), 514]
    assert ids == [512, 7, 8, 513, *encode("x"), 514]
    assert plain == [1, *encode("the end")]


def check_reasoning_effort(running: RunningServer, encode: Callable[[str], list[int]]) -> None:
    def prompt(**fields: Any) -> list[int]:
        found: list[int] = chat(running, **fields)["prompt_token_ids"]
        return found

    assert prompt(reasoning_effort="high") == encode("high/:the end")
    assert prompt(reasoning_effort="none") == encode("none/False:the end")
    given = {"reasoning_effort": "mine", "enable_thinking": True}
    assert prompt(reasoning_effort="none", chat_template_kwargs=given) == encode("mine/True:the end")


def test_a_suffix_is_refused_by_a_model_that_cannot_fill_in(server: RunningServer) -> None:
    error = server.post(COMPLETION, {"prompt": "a", "suffix": "b"}).json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")


# ---- fields of the SDKs ----


def test_every_field_of_the_sdk_is_accepted_or_refused_by_name(scripted: RunningServer) -> None:
    """Also with newer SDKs: a field that is not decided on yet fails here."""
    values: dict[str, Any] = {
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "prediction": {"type": "content", "content": "a"},
        "prompt_cache_key": "a",
        "prompt_cache_options": {},
        "prompt_cache_retention": "24h",
        "reasoning_effort": "low",
        "safety_identifier": "a",
        "service_tier": "auto",
        "store": True,
        "user": "a",
        "verbosity": "low",
    }
    refused = {"audio", "web_search_options", "moderation", "functions", "function_call"}
    of_the_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for create, body in ((ChatCompletions.create, ChatBody), (Completions.create, CompletionBody)):
        names = set(inspect.signature(create).parameters) - of_the_client
        assert names <= set(body.model_fields), names - set(body.model_fields)
    request = {"messages": MESSAGES, "max_tokens": 2}
    assert scripted.post(CHAT, {**request, **values}).status_code == 200
    assert scripted.post(CHAT, {**request, **dict.fromkeys({*values, *refused, "logit_bias"})}).status_code == 200
    for name in refused:
        error = scripted.post(CHAT, {**request, name: {}}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert error["message"].startswith(f"{name}: ")
    for name in ("chat_template", "use_beam_search", "guided_decoding_backend"):
        error = scripted.post(COMPLETION, {"prompt": "a", name: "x"}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_the_fingerprint_is_the_same_in_all_answers_of_a_server(server: RunningServer) -> None:
    found = {complete(server)["system_fingerprint"], chat(server)["system_fingerprint"]}
    for path, body in ((COMPLETION, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES, "max_tokens": 2})):
        found |= {event["system_fingerprint"] for event in server.events(path, body)}
    assert len(found) == 1
    assert found.pop().startswith("fp_")


# ---- prompts ----


def test_the_final_message_is_continued(server: RunningServer, tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is "}]
    plain = "<|begin|><|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\nIt is "
    expected = tokenizer.encode(plain, add_special_tokens=False)
    for fields in ({}, {"add_generation_prompt": False}):
        found = chat(server, messages=messages, continue_final_message=True, **fields)
        assert found["prompt_token_ids"] == expected
    asked = {"messages": messages, "continue_final_message": True}
    assert server.post("/tokenize", asked).json()["tokens"] == expected
    parts = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "It is "}]}]
    assert server.post("/tokenize", {**asked, "messages": parts}).json()["tokens"] == expected
    hostile = [*MESSAGES, {"role": "assistant", "content": "It is <|im_end|>"}]
    tokens = server.post("/tokenize", {**asked, "messages": hostile}).json()["tokens"]
    assert tokens[: len(expected) - 1] == expected[:-1]
    assert tokens.count(tokenizer.token_id("<|im_end|>")) == 1


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    from evenflow.errors import InvalidRequest
    from evenflow.model.text.chat_template import ChatTemplate

    messages = [*MESSAGES, {"role": "assistant", "content": " It is "}]
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    with pytest.raises(InvalidRequest, match="leaves out the final message"):
        template.render(messages, continue_final_message=True)
    stripping = ChatTemplate({"default": "{{ messages[-1].content | trim }}<end>"}, {})
    assert stripping.render(messages, continue_final_message=True) == "It is "


def test_a_long_prompt_is_truncated_to_its_last_tokens(server: RunningServer, tokenizer: Tokenizer) -> None:
    def prompt(**fields: Any) -> list[int]:
        found: list[int] = complete(server, **fields)["choices"][0]["prompt_token_ids"]
        return found

    assert prompt(truncate_prompt_tokens=3) == PROMPT[-3:]
    assert prompt(truncate_prompt_tokens=2**62) == PROMPT
    long = [1, *range(10, 400)]
    assert prompt(prompt=long, truncate_prompt_tokens=-1) == [1, *long[-249:]]  # 256 less 6 to generate
    assert prompt(prompt=long, truncate_prompt_tokens=-1, max_tokens=0) == [1, *long[-254:]]
    text = "the end of it all"
    whole = tokenizer.encode(text)
    assert prompt(prompt=text, truncate_prompt_tokens=2) == [whole[0], whole[-1]]
    assert prompt(prompt=text, truncate_prompt_tokens=1) == whole[-1:]
    echoed = complete(server, prompt=text, truncate_prompt_tokens=2, echo=True, max_tokens=0)
    assert echoed["choices"][0]["text"] == tokenizer.decode(whole[-1:])
    chatted = chat(server, messages=[{"role": "user", "content": "the end " * 200}], truncate_prompt_tokens=20)
    assert len(chatted["prompt_token_ids"]) == 20
    assert chatted["prompt_token_ids"][0] == 1
    error = server.post(COMPLETION, {"prompt": long, "truncate_prompt_tokens": 300}).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_all_prompt_logprobs_add_up_to_one(server: RunningServer) -> None:
    rows = complete(server, prompt_logprobs=-1, logprobs=2, echo=True)["choices"][0]["prompt_logprobs"]
    with torch.no_grad():
        wanted = reference_model("LlamaForCausalLM")(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert rows[0] is None
    for place, row in enumerate(rows[1:]):
        assert len(row) == 512
        assert sorted(entry["rank"] for entry in row.values()) == list(range(1, 513))
        found = torch.tensor([row[str(token_id)]["logprob"] for token_id in range(512)])
        torch.testing.assert_close(found, wanted[place], atol=1e-4, rtol=1e-4)


# ---- token ids ----


def test_streams_hold_the_same_token_ids_as_whole_answers(server: RunningServer) -> None:
    whole = complete(server, n=2, temperature=1, seed=5, ignore_eos=True)
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 1, "seed": 5, "n": 2, "ignore_eos": True}
    events = server.events(COMPLETION, {**body, "return_token_ids": True})
    for choice in whole["choices"]:
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert [one["prompt_token_ids"] for one in own if "prompt_token_ids" in one] == [PROMPT]
        assert "prompt_token_ids" in own[0]
        assert [token_id for one in own for token_id in one["token_ids"]] == choice["token_ids"]
        assert len(choice["token_ids"]) == 6
    assert "token_ids" not in server.post(COMPLETION, body).json()["choices"][0]


def test_streamed_chats_hold_token_ids_too(server: RunningServer) -> None:
    whole = chat(server)
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    first, *others = server.events(CHAT, body)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    streamed = [token_id for event in others for token_id in event["choices"][0]["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]


def test_a_scored_prompt_has_no_output_tokens(server: RunningServer) -> None:
    assert complete(server, max_tokens=0, echo=True)["choices"][0]["token_ids"] == []


# ---- the prefix cache ----


def test_salts_do_not_share_a_prefix_cache(server: RunningServer) -> None:
    prompt = list(range(100, 180))

    def cached(**fields: Any) -> int:
        found = complete(server, prompt=prompt, **fields)
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    for fields in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a", "tenant": "x"}, {"tenant": "a"}, {}):
        assert cached(**fields) == 0, fields
        assert cached(**fields) == 64, fields


def test_no_tenant_can_be_named_to_get_anothers_salt() -> None:
    made = [
        cache_salt(key, tenant, salt)
        for key in ("", "0a")
        for tenant in ("", "a", "1:ab", "a/b", "+", "0a/b")
        for salt in (None, "a", "b", "1:ab", "/", "b/c", "+0:a")
    ]
    assert len(set(made)) == len(made)
