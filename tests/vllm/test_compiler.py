"""The compiler over a real vLLM: started with flags that it takes, its tokens those of transformers, its calls counted.

One engine serves all tests, since starting it takes a minute on some machines.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.driving import vllm_version  # skips without vLLM

import torch  # isort: skip
from transformers import AutoModelForCausalLM  # isort: skip

from evenflow.advisor import VLLMChunkedPrefillConfig  # isort: skip
from evenflow.advisor.vllm_flags import caps_lone_prompts  # isort: skip
from evenflow.compile import VLLMChunkedModelWrapper, create_vllm_enhanced_compiler  # isort: skip
from tests.compile.architectures import padding_mask  # isort: skip
from tests.models import tiny_hf_folder  # isort: skip
from tests.vllm.fronts import ENVIRONMENT, MODEL_SIZES, needs_vllm  # isort: skip

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.filterwarnings("ignore")]

MODEL_LENGTH = 8192
BUDGET = 4096
SHORT, LONG, VERY_LONG = 47, 3000, 5000
THRESHOLD = 2400  # 80% of the longer example
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def prompts(num_sequences: int, length: int, seed: int) -> torch.Tensor:
    """Prompts with different seeds have no prefix in common."""
    return torch.randint(3, 500, (num_sequences, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    sizes = {**MODEL_SIZES, "max_position_embeddings": MODEL_LENGTH}
    folder = tiny_hf_folder(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", **sizes)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Started:
    """A model that generates in vLLM, its compiler, and what was logged while it started.

    `chunks` has the lengths of the chunks that vLLM's scheduler made, by request.
    """

    def __init__(self, plain: Any) -> None:
        self.chunks: dict[str, list[int]] = {}
        self.log: list[str] = []
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: self.log.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("evenflow")
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            self.compiler = create_vllm_enhanced_compiler(
                enable_cuda_graphs=False,
                vllm_config=VLLMChunkedPrefillConfig(max_num_batched_tokens=BUDGET),
            )
            examples = [prompts(1, SHORT, 0), prompts(1, LONG, 0)]
            self.model = self.compiler.compile_model(plain, examples, "tiny")
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
        if self.model.engine is not None:
            self._watch(self.model.engine.llm_engine.engine_core.engine_core.scheduler)

    def _watch(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            planned = schedule(*args, **kwargs)
            for request_id, num_tokens in planned.num_scheduled_tokens.items():
                if num_tokens > 1:  # a decode is one
                    self.chunks.setdefault(request_id, []).append(num_tokens)
            return planned

        scheduler.schedule = watched


@pytest.fixture(scope="module")
def started(plain: Any) -> Iterator[Started]:
    from vllm.distributed import cleanup_dist_env_and_memory

    cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        for name, value in {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)  # in this process, where its steps can be seen
        started = Started(plain)
        yield started
        if started.model.engine is not None:
            started.model.engine.llm_engine.engine_core.shutdown()
            started.model.engine = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM does not close all that it opens
            gc.collect()
            cleanup_dist_env_and_memory()
    os.sched_setaffinity(0, cores)  # vLLM binds the process to cores of its own choice
    torch.set_num_threads(num_threads)


def test_vllm_is_started_with_the_automatic_threshold(started: Started) -> None:
    assert isinstance(started.model, VLLMChunkedModelWrapper)
    assert started.model.backend == "vllm", started.log
    assert started.model.chunking_threshold == THRESHOLD
    assert started.model.engine_args == {
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": THRESHOLD,
        "max_num_batched_tokens": BUDGET,
        "disable_chunked_mm_input": False,
        "dtype": "float32",
        "enforce_eager": True,
    }
    assert started.model.engine_args.notes.keys() == {"max_num_partial_prefills", "max_long_partial_prefills"}
    scheduler = started.model.engine.llm_engine.vllm_config.scheduler_config
    assert scheduler.enable_chunked_prefill
    assert scheduler.long_prefill_token_threshold == THRESHOLD
    assert scheduler.max_num_batched_tokens == BUDGET
    assert any(f"--long-prefill-token-threshold {THRESHOLD}" in line for line in started.log)
    assert "tiny generates in vLLM." in started.log


@pytest.mark.parametrize(
    ("lengths", "is_cut"),
    [
        ([SHORT, 30], False),
        ([LONG], caps_lone_prompts(vllm_version())),
        ([VERY_LONG], True),  # over the budget
        ([LONG + 1, SHORT], True),  # over the threshold, and beside another
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(lengths: list[int], is_cut: bool, started: Started, plain: Any) -> None:
    before = started.model.get_chunking_stats()
    report_before = started.model.get_performance_report()
    started.chunks.clear()
    mask = padding_mask(lengths, "left")
    tokens = prompts(len(lengths), max(lengths), seed=sum(lengths)) * mask
    call = {"attention_mask": mask, **GREEDY}
    got = started.model.generate(tokens, **call)
    assert torch.equal(got, plain.generate(tokens, **call))
    assert sorted(map(sum, started.chunks.values())) == sorted(lengths)
    assert any(len(chunks) > 1 for chunks in started.chunks.values()) == is_cut
    after, report = started.model.get_chunking_stats(), started.model.get_performance_report()
    assert after["total_calls"] == before["total_calls"] + 1
    assert after["chunked_calls"] == before["chunked_calls"] + is_cut
    assert after["total_calls"] == after["chunked_calls"] + after["traditional_calls"]
    num_prompt_tokens, num_steps = sum(lengths), got.shape[1] - tokens.shape[1]
    num_tokens = report["tokens"] - report_before["tokens"]
    assert num_prompt_tokens + num_steps <= num_tokens <= num_prompt_tokens + num_steps * len(lengths)
    assert report["seconds"] > report_before["seconds"]
    assert report["engine_args"] == started.model.engine_args


def test_the_compiler_reports_on_its_models(started: Started) -> None:
    started.model.generate(prompts(1, SHORT, seed=5), **GREEDY)
    stats, report = started.compiler.get_chunking_stats(), started.compiler.get_performance_report()
    assert stats["total_calls"] == started.model.stats["calls"] > 0
    assert stats["models"]["tiny"] == started.model.get_chunking_stats()
    assert report["models"]["tiny"]["backend"] == "vllm"
    assert report["compilations"] == []  # the local model only computes logits


def test_what_vllm_does_not_have_runs_in_the_local_model(
    started: Started, plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompts(1, SHORT, seed=6)
    beams = {"num_beams": 2, **GREEDY}
    assert torch.equal(started.model.generate(tokens, **beams), plain.generate(tokens, **beams))
    assert "vLLM has no num_beams" in caplog.text
    torch.testing.assert_close(started.model(tokens).logits, plain(tokens).logits)
    before = started.model.stats["chunked_calls"]
    long = prompts(1, LONG, seed=7)
    torch.testing.assert_close(
        started.model(long, logits_to_keep=1).logits, plain(long, logits_to_keep=1).logits, atol=1e-3, rtol=0
    )
    assert started.model.stats["chunked_calls"] == before + 1
    assert started.model.get_chunking_stats()["optimizer_stats"]["chunks_processed"] == -(-LONG // 512)


def test_a_given_engine_is_used_as_it_is(started: Started, plain: Any) -> None:
    compiler = create_vllm_enhanced_compiler(chunking_threshold=32, engine=started.model.engine)
    model = compiler.compile_model(plain, prompts(1, SHORT, 0), "other")
    assert (model.backend, model.engine_args) == ("vllm", {})
    tokens = prompts(1, SHORT, seed=8)
    assert torch.equal(model.generate(tokens, **GREEDY), plain.generate(tokens, **GREEDY))
    assert model.get_chunking_stats()["chunked_calls"] == 0  # over its threshold, but vLLM does not cut it


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({}, {"enable_chunked_prefill": True, "long_prefill_token_threshold": 2048}),
        ({"chunking_threshold": 19_200}, {"enable_chunked_prefill": True}),  # vLLM refuses more than the model's length
        ({"enable_chunked_prefill": False}, {"enable_chunked_prefill": False}),
        (
            {"vllm_config": VLLMChunkedPrefillConfig(long_prefill_token_threshold=768)},
            {"enable_chunked_prefill": True, "long_prefill_token_threshold": 768},
        ),
    ],
    ids=str,
)
def test_a_real_vllm_takes_these_flags(settings: dict[str, Any], taken: dict[str, Any], plain: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs

    compiler = create_vllm_enhanced_compiler(**settings)
    args = compiler.engine_args_for(plain, compiler.chunking_threshold or 2048)
    assert args == {"disable_chunked_mm_input": False, **taken}
    scheduler = (
        EngineArgs(model=plain.config._name_or_path, dtype="float32", **args).create_engine_config().scheduler_config
    )
    assert scheduler.enable_chunked_prefill == taken["enable_chunked_prefill"]
    assert scheduler.long_prefill_token_threshold == taken.get("long_prefill_token_threshold", 0)


def test_a_vllm_that_does_not_start(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(plain.config, "_name_or_path", str(tmp_path))
    monkeypatch.setattr("evenflow.compile.aot.packages.export_step", _not_here)
    model = create_vllm_enhanced_compiler(cache_dir=tmp_path).compile_model(plain, prompts(1, SHORT, 0), "broken")
    assert (model.backend, model.engine_args) == ("local", {})
    assert "broken: vLLM did not start: " in caplog.text


def _not_here(*_: Any) -> None:
    raise RuntimeError("compiling takes a while and does not matter here")
