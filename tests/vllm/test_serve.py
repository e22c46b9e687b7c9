"""`evenflow serve --engine vllm` over a real vLLM: two starts, minutes each on some machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.models import tiny_hf_folder

_PYTHON_VARIABLE = "EVENFLOW_VLLM_PYTHON"
_START_S = 600
_LONG_PROMPT = 3000
_MAX_LENGTH = 60_000

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(_PYTHON_VARIABLE not in os.environ, reason=f"${_PYTHON_VARIABLE} names no Python with vLLM"),
]


class Front:
    """The command in a process of its own."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-c", "import sys; from evenflow.cli.main import main; sys.exit(main())", "serve"]
        options = ["--engine", "vllm", "--model", str(model), "--served-model-name", "tiny", "--tbt-target", "2s"]
        flags = ["--", "--enforce-eager", "--max-model-len", str(_MAX_LENGTH), "--dtype", "float32"]
        self.process = subprocess.Popen(
            [*command, *options, "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "EVENFLOW_CACHE": str(model / "cache")},
        )
        assert self.process.stderr is not None
        line = next(line for line in self.process.stderr if "evenflow: Starting vLLM" in line)
        self.url = line[line.index("http") : line.index("/ready")]
        self._reader = threading.Thread(target=self.process.stderr.read)
        self._reader.start()
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)
        self.until(lambda: self.get("/ready").status_code == 200)

    def close(self) -> None:
        self.process.kill()
        self._reader.join()  # it ends with the last of vLLM's processes, which hold the pipe too
        with self.process:
            pass

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that must come; the limit is only there to fail instead of hanging."""
        end = time.monotonic() + _START_S
        while not is_so():
            assert self.process.poll() is None, "the command ended"
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.2)

    def complete(self, num_prompt_tokens: int, max_tokens: int, first_token: int, stream: bool = False) -> Any:
        prompt = [first_token, *(3 + position % 500 for position in range(num_prompt_tokens - 1))]
        return self.openai.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=max_tokens,
            stream=stream,
            extra_body={"ignore_eos": True, "temperature": 0},
        )

    def chunks_beside_decodes(self, first_token: int) -> list[int]:
        """The lengths of a long prompt's chunks in steps that decode too, as the page is told of them."""
        with (
            ThreadPoolExecutor(1) as pool,
            self.complete(5, _MAX_LENGTH - 5, first_token + 1, stream=True) as chat,
            httpx.stream("GET", self.url + "/live/feed", timeout=_START_S) as response,
        ):
            next(iter(chat))  # it goes on for far longer than the prompt takes
            lines = response.iter_lines()
            while next(lines) != "event: figures":  # what came before is told by now
                pass
            # Asked while this thread reads: whoever reads too slowly is not told everything.
            asking = pool.submit(self.complete, _LONG_PROMPT, 1, first_token)
            found: list[int] = []
            end = 0
            while end < _LONG_PROMPT:
                if asking.done():
                    asking.result()  # an error would be why nothing comes
                if next(lines) == "event: steps":
                    columns = json.loads(next(lines).removeprefix("data: "))
                    for num_decodes, chunks in zip(columns["decodes"], columns["chunks"], strict=True):
                        end = max([end, *(start + length for _, start, length, *_ in chunks)])
                        found += [length for _, _, length, *_ in chunks if num_decodes]
            return found

    def vllm_group(self) -> int:
        """The id of vLLM's process group: that of the command's child whose command line says so."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = (pid for pid in children if b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return int(found)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": _MAX_LENGTH}
    running = Front(tiny_hf_folder(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", **sizes))
    yield running
    running.close()


def test_vllm_answers_through_evenflow(front: Front) -> None:
    assert front.complete(20, 7, first_token=3).usage.completion_tokens == 7
    tokens = httpx.post(front.url + "/tokenize", json={"model": "tiny", "prompt": "abc"}, timeout=60).json()
    assert tokens["count"] > 0
    figures = front.get("/metrics").text
    assert "vllm:generation_tokens_total" in figures
    assert 'evenflow:up{engine="0",model_name="tiny"} 1.0' in figures


def test_a_new_target_changes_the_chunks(front: Front) -> None:
    front.chunks_beside_decodes(first_token=10)  # the step-time model learns
    before = front.chunks_beside_decodes(first_token=20)
    assert httpx.put(front.url + "/v1/target", json={"tbt_target": "1ms"}).status_code == 200
    after = front.chunks_beside_decodes(first_token=30)
    assert max(after) < max(before)


def test_a_killed_vllm_comes_back_and_the_end_leaves_nothing(front: Front) -> None:
    first = front.vllm_group()
    os.kill(first, signal.SIGKILL)
    front.until(lambda: front.get("/health").status_code == 503)
    front.until(lambda: front.get("/ready").status_code == 200)
    assert front.complete(20, 3, first_token=3).usage.completion_tokens == 3
    assert front.get("/v1/target").json()["tbt_target"] == 0.001
    second = front.vllm_group()
    assert second != first
    front.process.terminate()
    assert front.process.wait(_START_S) == 0
    for group in (first, second):
        _wait_until_gone(group)


def _wait_until_gone(group: int) -> None:
    """Killed workers may need a moment to be reaped."""
    end = time.monotonic() + 60
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < end, f"processes of group {group} are left"
        time.sleep(0.1)
