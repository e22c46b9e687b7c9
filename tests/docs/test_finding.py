"""What is found in a page, so that nothing is left out in silence."""

from __future__ import annotations

import pytest

from tests.docs.pages import PAGES, Block, blocks, commands, evenflow_arguments, inline_commands, parse
from tests.docs.stand_ins import replace, shortened, why_not_run


def console(text: str) -> list[str]:
    return list(commands(Block("a page", 1, "console", text)))


def test_commands_are_told_from_output() -> None:
    assert console("$ evenflow doctor   # a comment\nok\n\n$ make demo\n") == [
        "evenflow doctor   # a comment",
        "make demo",
    ]


def test_commands_over_several_lines() -> None:
    assert console("$ curl a \\\n    -d b\n$ c\n") == ["curl a \\\n    -d b", "c"]
    assert console("$ curl -d '{\n  1}\n'\n$ c\n") == ["curl -d '{\n  1}\n'", "c"]


@pytest.mark.parametrize(
    "command", ["evenflow demo  # comment", ".venv/bin/evenflow demo", "python -m evenflow demo", "evenflow \\\n demo"]
)
def test_the_arguments_of_evenflow(command: str) -> None:
    assert evenflow_arguments(command) == ["demo"]


def test_other_programs_have_none() -> None:
    assert evenflow_arguments("python -m pip install evenflow") is None


def test_only_what_is_listed_is_not_run() -> None:
    assert why_not_run("make test   # all") == "make test"
    assert why_not_run(".venv/bin/evenflow serve --engine vllm --model M") == "evenflow serve --engine vllm"
    assert why_not_run("python -m vllm.entrypoints.openai.api_server \\\n --model M") == "python -m vllm."
    for command in ("make test-slow", "evenflow serve", "python examples/x.py", "make tests"):
        assert why_not_run(command) is None


def test_stand_ins() -> None:
    ports = {"8000": 1234, "8001": 1, "8002": 2, "8080": 3, "4318": 4}
    assert replace("curl localhost:8000/v1 --max 80001", ports) == "curl localhost:1234/v1 --max 80001"
    assert shortened(["doctor"]) == ["doctor"]
    assert shortened(["bench", "stall", "--explain"])[:4] == ["bench", "stall", "--explain", "--repeat"]


def test_a_wrong_option_is_found() -> None:
    parse(["serve", "--port", "1"])
    parse(["bench", "stall"])
    with pytest.raises(Exception, match="--no-such-option"):
        parse(["serve", "--no-such-option"])
    with pytest.raises(Exception, match="no-such-command"):
        parse(["no-such-command"])


def test_the_pages_have_much_to_run() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert sum(len(list(commands(block))) for block in found if block.language == "console") > 60
    assert sum(block.language == "python" for block in found) > 8
    assert sum(len(inline_commands(page)) for page in PAGES) > 20
