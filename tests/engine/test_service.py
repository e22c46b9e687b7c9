"""Classes and tenants through the Python API: from a caller's words to the order of steps."""

from __future__ import annotations

import asyncio

import pytest

from evenflow import EngineConfig
from evenflow.core.request import SamplingParams
from evenflow.core.service_classes import DEFAULT_CLASSES, ServiceClass
from evenflow.errors import DeadlineExceeded, InvalidConfig, InvalidRequest
from evenflow.executors.fake import fake_continuation
from evenflow.executors.recorded import replay
from tests.engine.fakes import VOCAB, fake_async_llm, fake_engine, fake_llm


def test_priorities_choose_the_order_of_prompts() -> None:
    llm = fake_llm("fixed:64")
    prompts = [[number] * 64 for number in range(3)]
    ended: list[str] = []
    outputs = llm.generate(
        prompts,
        SamplingParams(max_tokens=1),
        priority=[5, 0, -1],
        on_delta=lambda delta: ended.append(delta.request_id),
    )
    assert ended == [outputs[2].request_id, outputs[1].request_id, outputs[0].request_id]
    assert [output.token_ids for output in outputs] == [fake_continuation(prompt, 1, VOCAB) for prompt in prompts]


def test_one_priority_for_all_or_one_each() -> None:
    llm = fake_llm()
    assert len(llm.generate([[1], [2]], SamplingParams(max_tokens=1), priority=3)) == 2
    with pytest.raises(InvalidRequest, match="Got 1 priorities for 2 prompts but expected one each"):
        llm.generate([[1], [2]], SamplingParams(max_tokens=1), priority=[3])


def test_a_request_carries_its_class_its_tenant_and_its_salt() -> None:
    llm = fake_llm()
    plain = llm.prepare([1] * 40)
    assert (plain.tenant, plain.service_class, plain.salt) == ("", "standard", b"")
    acme = llm.prepare([1] * 40, tenant="acme", priority=1)
    assert (acme.tenant, acme.service_class, acme.salt) == ("acme", "batch", b"acme")
    salted = llm.prepare([1] * 40, tenant="acme", cache_salt="team", service_class="interactive")
    assert (salted.tenant, salted.service_class, salted.salt) == ("acme", "interactive", b"team")
    assert len({plain.block_hashes[0], acme.block_hashes[0], salted.block_hashes[0]}) == 3
    with pytest.raises(InvalidRequest, match="service_class='fast' but expected one of"):
        llm.prepare([1], service_class="fast")


def test_concurrent_callers_of_all_classes_and_tenants_get_whole_answers() -> None:
    async def main() -> None:
        async with fake_async_llm(fake_engine(num_blocks=24, max_num_seqs=3)) as llm:
            calls = [
                llm.generate(
                    [number] * (10 + number),
                    SamplingParams(max_tokens=9),
                    tenant=f"t{number % 3}",
                    priority=number % 4 - 1,
                )
                for number in range(20)
            ]
            for number, output in enumerate(await asyncio.gather(*calls)):
                assert output.token_ids == fake_continuation([number] * (10 + number), 9, VOCAB)

    asyncio.run(main())


def test_a_recorded_run_of_several_classes_is_planned_again(tmp_path: object) -> None:
    path = tmp_path / "run.jsonl"  # type: ignore[operator]
    llm = fake_llm("target:20ms", record=path, max_num_seqs=3)
    for number in range(12):
        request = llm.prepare(
            [number] * 70, SamplingParams(max_tokens=6), tenant=f"t{number % 2}", priority=number % 3 - 1
        )
        llm.add(request)
        llm.step()
    while llm.engine.has_work:
        llm.step()
    llm.close()
    assert len(replay(path)) > 12


def test_settings_are_checked_and_sorted() -> None:
    assert EngineConfig().classes == DEFAULT_CLASSES
    only = (ServiceClass(name="low", rank=3, share=0.2), ServiceClass(name="high", rank=1, share=0.5))
    assert [one.name for one in EngineConfig(classes=only).classes] == ["high", "low"]
    with pytest.raises(InvalidConfig, match="weight -1 of tenant 'acme'"):
        EngineConfig(tenant_weights={"acme": -1})


def test_an_expired_request_ends_with_an_error_and_the_others_with_answers(tmp_path: object) -> None:
    path = tmp_path / "run.jsonl"  # type: ignore[operator]
    llm = fake_llm(max_num_seqs=1, record=path)
    with_deadline = SamplingParams(max_tokens=50, deadline=0.08)
    expired, whole = llm.generate([[1] * 50, [2] * 50], [with_deadline, SamplingParams(max_tokens=3)])
    assert (
        expired.error == f"The request's deadline of 0.08 s passed after {len(expired.token_ids)} tokens of the answer."
    )
    assert (expired.finish_reason, 0 < len(expired.token_ids) < 50) == ("error", True)
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 3)
    llm.close()
    assert len(replay(path)) > 2


def test_a_stream_raises_when_its_deadline_passes() -> None:
    found: list[int] = []

    async def main() -> None:
        async with fake_async_llm(fake_engine()) as llm:
            async for delta in llm.stream([1] * 20, SamplingParams(max_tokens=300, deadline=0.1)):
                found.extend(delta.token_ids)

    with pytest.raises(DeadlineExceeded, match="passed after"):
        asyncio.run(main())
    assert 0 < len(found) < 300
    assert found == fake_continuation([1] * 20, len(found), VOCAB)
