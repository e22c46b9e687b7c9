"""The loop over the fake executor: outputs, stop strings, failures, statistics."""

from __future__ import annotations

import logging
import random

import pytest

from evenflow.core.plan import StepPlan
from evenflow.core.request import SamplingParams
from evenflow.engine.llm import LLM
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.errors import EngineFailed, InvalidRequest
from evenflow.executors.fake import fake_continuation
from tests.engine.fakes import VOCAB, fake_llm


def run(llm: LLM) -> tuple[dict[str, RequestOutput], list[Delta]]:
    deltas: list[Delta] = []
    while llm.engine.has_work:
        deltas += llm.step()
    return {delta.request_id: delta.output for delta in deltas if delta.finish_reason}, deltas


def add(llm: LLM, prompt: list[int], name: str = "r", service_class: str | None = None, **sampling: object) -> None:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    llm.add(llm.prepare(prompt, params, request_id=name, service_class=service_class))


@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_is_whole_and_timed(depth: int) -> None:
    llm = fake_llm(depth=depth)
    prompt = list(range(100))
    add(llm, prompt, max_tokens=5)
    outputs, deltas = run(llm)
    output = outputs["r"]
    expected = fake_continuation(prompt, 5, VOCAB)
    assert output.token_ids == expected
    assert output.text == "".join(f" {token}" for token in expected) == "".join(delta.text for delta in deltas)
    assert (output.finish_reason, output.error) == ("length", None)
    assert [(c.start, c.length, str(c.reason)) for c in output.chunks] == [(0, 64, "budget"), (64, 36, "end_of_prompt")]
    assert output.ttft_s == pytest.approx(0.1)
    assert output.latency_s == pytest.approx(0.104)


def test_an_answer_also_has_the_shape_of_vllms() -> None:
    llm = fake_llm()
    prompt = list(range(10))
    request = llm.prepare(prompt, SamplingParams(max_tokens=3), request_id="r")
    llm.add(request)
    while not (deltas := llm.step()):
        pass
    output = deltas[0].output
    [completion] = output.outputs
    assert (completion.text, completion.finish_reason, completion.finished()) == (output.text, None, False)
    assert not output.finished
    run(llm)
    assert output.finished
    assert (output.request_id, output.prompt_token_ids) == ("r", prompt)
    # A view: what came since is there, and nothing was copied.
    assert completion.token_ids is output.token_ids
    assert (completion.index, completion.text, completion.finish_reason) == (0, output.text, "length")
    assert completion.finished()
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
    assert output.outputs == [completion]
    assert repr(completion).startswith(f"CompletionOutput(index=0, text={output.text!r}, token_ids={output.token_ids}")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_ends_the_text_before_it(depth: int) -> None:
    prompt = list(range(30))
    tokens = fake_continuation(prompt, 8, VOCAB)
    stop = f" {tokens[3]} {tokens[4]}"
    llm = fake_llm(depth=depth)
    add(llm, prompt, max_tokens=8, stop=("never", stop, f" {tokens[4]}"))
    outputs, deltas = run(llm)
    assert outputs["r"].text == "".join(f" {token}" for token in tokens[:3])
    assert (outputs["r"].finish_reason, outputs["r"].stop_reason) == ("stop", stop)
    assert outputs["r"].token_ids == tokens[:5]
    assert "".join(delta.text for delta in deltas) == outputs["r"].text
    assert llm.engine.scheduler.pool.num_held == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_strings_are_looked_for_after_min_tokens(depth: int) -> None:
    """As in vLLM: the token after `min_tokens` is the first that may complete one, which may begin before."""
    prompt = list(range(30))
    words = [f" {token}" for token in fake_continuation(prompt, 10, VOCAB)]
    assert len(set(words)) == len(words)
    for min_tokens in range(11):
        for stop in ("".join(words[2:4]), "".join(words[4:6])):
            llm = fake_llm(depth=depth)
            add(llm, prompt, max_tokens=10, min_tokens=min_tokens, stop=(words[1], stop, words[3]))
            outputs, deltas = run(llm)
            ends = {words[1]: 2, stop: words.index(" " + stop.split()[-1]) + 1, words[3]: 4}  # by number of tokens
            met = sorted((count, -len(text), text) for text, count in ends.items() if count > min_tokens)
            whole, output = "".join(words), outputs["r"]
            assert "".join(delta.text for delta in deltas) == output.text
            assert output.stop_reason == (met[0][2] if met else None)
            assert output.text == (whole[: whole.index(met[0][2])] if met else whole)
            assert len(output.token_ids) == (met[0][0] if met else 10)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_text_ends_with_the_stop_if_asked_for(depth: int) -> None:
    prompt = list(range(30))
    tokens = fake_continuation(prompt, 10, VOCAB)
    words = [f" {token}" for token in tokens]
    for stop in ({"stop": ("".join(words[2:4]), words[3])}, {"stop_token_ids": (tokens[3],)}):
        llm = fake_llm(depth=depth)
        add(llm, prompt, max_tokens=10, include_stop_str_in_output=True, **stop)
        outputs, deltas = run(llm)
        assert outputs["r"].text == "".join(delta.text for delta in deltas) == "".join(words[:4])
        assert outputs["r"].finish_reason == "stop"


def test_a_stop_string_met_early_hides_no_longer_one() -> None:
    """The end of the early text may be held back as the beginning of another stop string."""
    prompt = list(range(30))
    words = [f" {token}" for token in fake_continuation(prompt, 6, VOCAB)]
    llm = fake_llm()
    longer = "".join(words[:4])
    add(llm, prompt, max_tokens=6, min_tokens=3, stop=(words[1], longer + " and more"))
    outputs, _ = run(llm)
    assert (outputs["r"].text, outputs["r"].stop_reason) == ("".join(words), None)
    add(llm, prompt, max_tokens=6, min_tokens=3, stop=(words[1], longer))
    outputs, _ = run(llm)
    assert (outputs["r"].text, outputs["r"].stop_reason) == ("", longer)


def test_text_that_only_looks_like_a_stop_string_comes_out_in_the_end() -> None:
    prompt = list(range(30))
    tokens = fake_continuation(prompt, 4, VOCAB)
    llm = fake_llm()
    add(llm, prompt, max_tokens=4, stop=(f" {tokens[3]} and more",))
    outputs, _ = run(llm)
    assert outputs["r"].text == "".join(f" {token}" for token in tokens)
    assert outputs["r"].stop_reason is None


def test_a_stop_token_is_no_part_of_the_text() -> None:
    prompt = list(range(30))
    tokens = fake_continuation(prompt, 8, VOCAB)
    llm = fake_llm()
    add(llm, prompt, max_tokens=8, stop_token_ids=(tokens[2],))
    outputs, _ = run(llm)
    assert outputs["r"].token_ids == tokens[:3]
    assert outputs["r"].text == "".join(f" {token}" for token in tokens[:2])
    assert outputs["r"].finish_reason == "stop"


def test_a_failed_step_answers_those_in_it_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def disturb(plan: StepPlan) -> None:
        if any(chunk.request_id == "bad" for chunk in plan.chunks):
            raise RuntimeError("the device is on fire")

    llm = fake_llm(disturb=disturb)
    add(llm, list(range(10)), "bad", max_tokens=4)
    outputs, _ = run(llm)
    assert (outputs["bad"].finish_reason, outputs["bad"].error) == ("error", "the device is on fire")
    assert "step 0 failed" in caplog.text
    assert "step 1 failed" in caplog.text
    add(llm, list(range(10)), "good", max_tokens=4)
    outputs, _ = run(llm)
    assert outputs["good"].token_ids == fake_continuation(list(range(10)), 4, VOCAB)


def test_abort_returns_what_there_was() -> None:
    llm = fake_llm()
    add(llm, list(range(10)), max_tokens=50)
    for _ in range(4):
        llm.step()
    output = llm.abort("r")
    assert output is not None
    assert (len(output.token_ids), output.finish_reason) == (4, "abort")
    assert llm.abort("r") is None
    assert not llm.engine.has_work


def test_preemption_is_not_seen_in_the_output() -> None:
    llm = fake_llm(num_blocks=8)
    for name in ("a", "b"):
        add(llm, [ord(name)] * 40, name, max_tokens=60)
    outputs, _ = run(llm)
    for name in ("a", "b"):
        assert outputs[name].token_ids == fake_continuation([ord(name)] * 40, 60, VOCAB)
        assert sum(chunk.length for chunk in outputs[name].chunks) == 40


def test_cached_tokens_are_reported_and_chunks_cover_the_rest() -> None:
    llm = fake_llm()
    for name in ("first", "again"):
        add(llm, list(range(100)), name, max_tokens=2)
        outputs, _ = run(llm)
    assert outputs["again"].num_cached_tokens == 96
    assert [(c.start, c.length) for c in outputs["again"].chunks] == [(96, 4)]
    assert llm.engine.stats.totals.prefix_hit_rate == pytest.approx(0.48)


def test_own_work_before_a_preemption_does_not_count_as_cached() -> None:
    llm = fake_llm("fixed:40", max_num_seqs=1)
    add(llm, list(range(90)), "patient", "batch", max_tokens=2)
    llm.step()
    add(llm, [7] * 20, "urgent", "interactive", max_tokens=2)
    outputs, _ = run(llm)
    patient = outputs["patient"]
    assert patient.num_cached_tokens == 0
    assert [(c.start, c.length) for c in patient.chunks] == [(0, 32), (32, 40), (72, 18)]  # whole blocks were kept


@pytest.mark.parametrize("seed", range(4))
def test_cached_tokens_and_chunks_are_the_prompt_whatever_preempts_it(seed: int) -> None:
    rng = random.Random(seed)
    llm = fake_llm("fixed:24", depth=1 + seed % 2, num_blocks=24, max_num_seqs=3)
    outputs: dict[str, RequestOutput] = {}
    for number in range(60):
        shared = [rng.randrange(3)] * rng.randrange(0, 80)
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 80))]
        add(llm, prompt, f"r{number}", rng.choice(("interactive", "standard", "batch")), max_tokens=8)
        for _ in range(rng.randrange(8)):
            outputs |= {delta.request_id: delta.output for delta in llm.step()}
    outputs |= run(llm)[0]
    assert len(outputs) == 60
    for output in outputs.values():
        ends = [output.num_cached_tokens, *(chunk.start + chunk.length for chunk in output.chunks)]
        num_computed = sum(chunk.length for chunk in output.chunks)
        assert output.num_cached_tokens + num_computed == ends[-1] == len(output.prompt_token_ids)
        assert ends[1:] == sorted(ends[1:])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty prompt"),
        ([VOCAB], "token id 500"),
        ([-1], "token id -1"),
        ([1.5], "token id 1.5"),
        (list(range(400)), "400 tokens"),
    ],
)
def test_bad_prompts_are_named_and_harm_nobody(prompt: list[int], message: str) -> None:
    llm = fake_llm()
    add(llm, [1, 2, 3], "good", max_tokens=3)
    with pytest.raises(InvalidRequest, match=message):
        llm.prepare(prompt, SamplingParams())
    outputs, _ = run(llm)
    assert outputs["good"].finish_reason == "length"


def test_the_context_ends_a_request() -> None:
    llm = fake_llm(max_model_len=20)
    add(llm, list(range(15)), max_tokens=100)
    outputs, _ = run(llm)
    assert len(outputs["r"].token_ids) == 5
    assert outputs["r"].finish_reason == "length"


def test_without_a_codec_there_are_only_tokens() -> None:
    llm = fake_llm(with_text=False)
    add(llm, [1, 2, 3], max_tokens=2)
    outputs, _ = run(llm)
    assert outputs["r"].text == ""
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llm.prepare("1 2 3", SamplingParams())


def test_work_that_cannot_be_planned_is_an_error_not_an_endless_loop() -> None:
    llm = fake_llm()
    add(llm, [1, 2, 3])
    llm.engine.scheduler.seats._free_slots.clear()
    with pytest.raises(EngineFailed, match="1 unfinished"):
        llm.step()


def test_throughput_is_logged_every_ten_seconds_of_activity(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenflow")
    llm = fake_llm(cost=lambda shape: 1.0)
    add(llm, list(range(128)), max_tokens=20)
    run(llm)
    lines = [record.message for record in caplog.records]
    assert lines == [
        "Avg prompt throughput: 12.8 tokens/s, Avg generation throughput: 0.9 tokens/s, Running: 1 reqs, "
        "Waiting: 0 reqs, KV cache usage: 4.5%, Prefix cache hit rate: 0.0%",
        "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 1 reqs, "
        "Waiting: 0 reqs, KV cache usage: 5.0%, Prefix cache hit rate: 0.0%",
    ]
