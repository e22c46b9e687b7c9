"""A few configurations that are always the same, and faults of every kind that the checks are to see.

`python -m tests.differential --help` says how to run many; the slow test draws new ones each time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenflow.core.blocks import BlockPool
from evenflow.core.logprobs import LogprobRows
from evenflow.core.plan import StepResult
from evenflow.core.prefix_cache import PrefixCache
from evenflow.core.seats import Seats
from evenflow.engine.outputs import Delta, Outputs
from tests.differential.configurations import PARTS, VOCAB_SIZE, draw
from tests.differential.judge import Finding
from tests.differential.machine import Tamper
from tests.differential.runs import run

ROOT = Path(__file__).parent.parent.parent
WITH = {name: frozenset(PARTS) - {name} for name in PARTS}  # what to leave out for a configuration with only this part


def test_configurations_without_a_finding() -> None:
    for number in (2, 4, 7, 18):
        assert run(draw(1, number))["requests"]


def test_a_configuration_is_the_same_each_time_and_so_is_its_run() -> None:
    for number in range(50):
        assert draw(7, number).describe() == draw(7, number).describe() != draw(8, number).describe()
    configuration = draw(1, 6)
    assert run(configuration) == run(configuration)


def test_leaving_out_a_part_or_a_request_changes_no_other() -> None:
    whole = draw(1, 3)
    some = draw(1, 3, only=[2, 5])
    assert list(some.asks) == [whole.asks[2], whole.asks[5]]
    assert [ask.prompt for ask in draw(1, 3, frozenset({"logprobs", "aborts"})).asks] == [
        ask.prompt for ask in whole.asks
    ]
    assert "--without 'aborts,logprobs' --only 2" in draw(1, 3, frozenset({"logprobs", "aborts"}), [2]).command


# ---- what is wrong is found ----


def once(spoil: Callable[[StepResult], StepResult | None]) -> Tamper:
    """Spoils one result: the first that can be."""
    is_done = False

    def tamper(result: StepResult) -> StepResult:
        nonlocal is_done
        spoiled = None if is_done else spoil(result)
        is_done = is_done or spoiled is not None
        return result if spoiled is None else spoiled

    return tamper


def wrong_token(result: StepResult) -> StepResult | None:
    given = [number for number, tokens in enumerate(result.tokens) if tokens]
    if not given:
        return None
    tokens = list(result.tokens)
    tokens[given[-1]] = ((tokens[given[-1]][0] + 1) % VOCAB_SIZE,)
    return replace(result, tokens=tuple(tokens))


def wrong_logprob(result: StepResult) -> StepResult | None:
    if not result.logprobs:
        return None
    number, (row,) = next(iter(result.logprobs.items()))
    wrong = row._replace(chosen=row.chosen._replace(logprob=row.chosen.logprob - 0.01))
    return replace(result, logprobs={**result.logprobs, number: LogprobRows.of([wrong])})


@pytest.mark.parametrize("parts", [frozenset(PARTS), WITH["paged"], WITH["sampling"]])
def test_a_wrong_token_is_found(parts: frozenset[str]) -> None:
    with pytest.raises(Finding, match=r"is \d+, logit .* but transformers' first is \d+"):
        run(draw(1, 2, parts), once(wrong_token))


def test_a_wrong_logprob_is_found() -> None:
    with pytest.raises(Finding, match="logprobs of token"):
        run(draw(1, 2, WITH["logprobs"]), once(wrong_logprob))


def leak_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(
        BlockPool, "release", lambda pool, blocks, *rest: release(pool, blocks[: len(blocks) - 1], *rest)
    )


def leak_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Seats.leave

    def leaving(seats: Seats, request: Any) -> None:
        leave(seats, request)
        seats._free_slots.pop()

    monkeypatch.setattr(Seats, "leave", leaving)


def lose_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Outputs.take

    def taking(outputs: Outputs, report: Any) -> Iterator[Delta]:
        return (delta for delta in take(outputs, report) if delta.finish_reason is None)

    monkeypatch.setattr(Outputs, "take", taking)


def share_with_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of other tenants are found, as if all had one salt."""
    from evenflow.engine import intake

    hashes = intake.hash_blocks
    monkeypatch.setattr(intake, "hash_blocks", lambda tokens, size, salt: hashes(tokens, size))


def forget_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks stay expected though nobody computes them."""
    monkeypatch.setattr(PrefixCache, "_stop_computing", lambda *arguments: None)


@pytest.mark.parametrize(
    ("spoil", "number", "part", "message"),
    [
        (leak_a_block, 2, "caching", "a block without its owner"),
        (leak_a_slot, 1, "caching", "slots leak"),
        (lose_the_end, 1, "caching", r"open are .* served \['ask-7'\]"),
        (share_with_everybody, 9, "tenants", "16 cached tokens, of whose prompt"),
        (forget_to_wait, 2, "caching", "blocks are expected that nobody computes"),
    ],
)
def test_what_is_lost_or_shared_is_found(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None], number: int, part: str, message: str
) -> None:
    spoil(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        run(draw(1, number, WITH[part]))


# ---- many, and new ones each time ----


@pytest.mark.slow
def test_random_configurations_give_transformers_tokens() -> None:
    command = [sys.executable, "-m", "tests.differential", "--seconds", "110"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
