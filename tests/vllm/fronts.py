"""`evenflow serve --engine vllm` over a real vLLM, whose start takes a minute on some machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.models import tiny_hf_folder

_PYTHON_VARIABLE = "EVENFLOW_VLLM_PYTHON"
START_S = 600
_LONG_PROMPT = 3000
_MAX_LENGTH = 60_000
MODEL_SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": _MAX_LENGTH}
_CALM = str(Path(__file__).with_name("calm"))
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (_CALM, os.environ.get("PYTHONPATH")))),
}
# Left to itself, vLLM binds each of two ranks to cores of a memory node of its own, and fails where there is only one.
A_CORE_A_RANK = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}

needs_vllm = pytest.mark.skipif(
    _PYTHON_VARIABLE not in os.environ, reason=f"${_PYTHON_VARIABLE} names no Python with vLLM"
)


def prompt_of(num_tokens: int, first_token: int) -> list[int]:
    """Prompts with different first tokens have no prefix in common."""
    return [first_token, *(3 + position % 500 for position in range(num_tokens - 1))]


class Front:
    """The command in a process of its own."""

    def __init__(
        self,
        model: Path,
        *more_options: str,
        policy: str = "target:2s",
        vllm_flags: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        command = [sys.executable, "-c", "import sys; from evenflow.cli.main import main; sys.exit(main())", "serve"]
        options = ["--engine", "vllm", "--model", str(model), "--served-model-name", "tiny", "--policy", policy]
        flags = ["--", "--enforce-eager", "--max-model-len", str(_MAX_LENGTH), "--dtype", "float32"]
        flags += ["--worker-cls", "evenflow.vllm.WarmWorker"]  # on a GPU evenflow adds this itself
        self.process = subprocess.Popen(
            [*command, *options, *more_options, "--port", "0", *flags, *vllm_flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, **environment, "EVENFLOW_CACHE": str(model / "cache")},
        )
        assert self.process.stderr is not None
        self.first_line = line = next(line for line in self.process.stderr if "evenflow: Starting vLLM" in line)
        self.url = line[line.index("http") : line.index("/ready")]
        self.log: list[str] = []
        self._reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
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

    def figure(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that must come; the limit is only there to fail instead of hanging."""
        end = time.monotonic() + START_S
        while not is_so():
            assert self.process.poll() is None, "the command ended"
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.2)

    def complete(self, num_prompt_tokens: int, max_tokens: int, first_token: int, stream: bool = False) -> Any:
        return self.openai.completions.create(
            model="tiny",
            prompt=prompt_of(num_prompt_tokens, first_token),
            max_tokens=max_tokens,
            stream=stream,
            extra_body={"ignore_eos": True, "temperature": 0, "return_token_ids": True},
        )

    def chunks_beside_decodes(self, first_token: int) -> list[int]:
        """The lengths of a long prompt's chunks in steps that decode too, as the page is told of them."""
        with (
            ThreadPoolExecutor(1) as pool,
            self.complete(5, _MAX_LENGTH - 5, first_token + 1, stream=True) as chat,
            httpx.stream("GET", self.url + "/live/feed", timeout=START_S) as response,
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

    def put_target(self, target: str | None) -> httpx.Response:
        return httpx.put(self.url + "/v1/target", json={"tbt_target": target})

    def set_target(self, target: str | None) -> None:
        assert self.put_target(target).status_code == 200

    def vllm_group(self) -> int:
        """The id of vLLM's process group: that of the command's child whose command line says so."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = (pid for pid in children if b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return int(found)


def small_model(folder: Path) -> Path:
    return tiny_hf_folder(folder, "LlamaForCausalLM", **MODEL_SIZES)
