"""vLLM's own parser takes the command lines of the documentation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from evenflow.cli import serve_host
from evenflow.cli.main import main
from evenflow.hosts.launch import HostLaunch, RunFolder
from tests.docs.pages import PAGES, blocks, commands, evenflow_arguments, words

if find_spec("vllm") is None:
    pytest.skip("runs in vLLM's environment: make test-vllm", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports

_MODULE = "vllm.entrypoints.openai.api_server"
COMMANDS = [
    command for page in PAGES for block in blocks(page) if block.language == "console" for command in commands(block)
]
THROUGH_EVENFLOW = [command for command in COMMANDS if "--engine vllm" in command]
DIRECT = [command for command in COMMANDS if f"python -m {_MODULE}" in command]


def parse(flags: Sequence[str]) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(list(flags))


def test_there_are_some() -> None:
    assert len(THROUGH_EVENFLOW) > 5
    assert len(DIRECT) > 1


@pytest.mark.parametrize("command", DIRECT)
def test_a_command_of_vllm_is_understood(command: str) -> None:
    line = words(command)
    parsed = parse(line[line.index(_MODULE) + 1 :])
    assert parsed.scheduler_cls == "evenflow.vllm.LatencyTargetScheduler"


@pytest.mark.parametrize("command", THROUGH_EVENFLOW)
def test_what_evenflow_makes_of_a_command_is_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[HostLaunch] = []

    async def keep(settings: Any, listener: Any, launch: HostLaunch, max_num_seqs: int) -> None:
        launches.append(launch)

    monkeypatch.setattr(serve_host, "serve", keep)  # what would start vLLM
    arguments = evenflow_arguments(re.sub(r"--port \d+", "", command))
    assert arguments is not None
    assert main(["serve", "--port", "0", *arguments[1:]]) == 0
    [launch] = launches
    line = launch.command(RunFolder(tmp_path))
    parsed = parse(line[line.index(_MODULE) + 1 :])
    assert parsed.scheduler_cls == "evenflow.vllm.LatencyTargetScheduler"
    for option in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"):
        if given := re.search(rf"--{option} (\d+)", command):
            assert getattr(parsed, option.replace("-", "_")) == int(given[1])
