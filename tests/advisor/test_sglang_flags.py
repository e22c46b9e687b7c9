from __future__ import annotations

import pytest

from evenflow.advisor.sglang_flags import FLAGS, check_known, command_flags, command_line, parse_version
from evenflow.errors import InvalidInput


@pytest.mark.parametrize("text", ["0.5.16", "0.5.18.post1", "v0.5.23", "0.5.23+cu130"])
def test_known_versions(text: str) -> None:
    check_known(text)


@pytest.mark.parametrize("text", ["0.5.15.post1", "0.5.24", "0.6.0"])
def test_other_versions_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"0\.5\.16 to 0\.5\.23 are known"):
        check_known(text)


def test_a_version_has_three_numbers() -> None:
    assert parse_version("0.5.22.post1") == (0, 5, 22)
    with pytest.raises(InvalidInput, match="one such as"):
        parse_version("main")


def test_every_flag_that_is_printed_is_among_those_that_releases_are_checked_for() -> None:
    settings = dict.fromkeys(
        ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "tensor_parallel_size", "data_parallel_size"), 8
    )
    settings |= {"gpu_memory_utilization": 1, "pipeline_parallel_size": 1, "enable_prefix_caching": False}
    for chunked in (True, False):
        line = [*command_flags({**settings, "enable_chunked_prefill": chunked}).flags, *command_line("m", {}).split()]
        flags = {flag.removeprefix("--").replace("-", "_") for flag in line if flag.startswith("--")}
        assert flags <= set(FLAGS)
