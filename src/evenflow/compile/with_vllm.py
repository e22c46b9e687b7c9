"""A compiler whose models generate in a vLLM engine if there is one, else in the local model in chunks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenflow.advisor.analysis import Analysis
from evenflow.advisor.decision import DEFAULT_THRESHOLD, should_enable_chunked_prefill
from evenflow.advisor.vllm_config import VLLMChunkedPrefillConfig, VLLMChunkedPrefillOptimizer
from evenflow.advisor.vllm_flags import installed_version
from evenflow.compile.chunks.optimizer import ChunkedPrefillOptimizer, ChunkedPrefillWrapper
from evenflow.compile.compiler import EnhancedAOTModelCompiler, ModelCompiler, create_enhanced_compiler
from evenflow.compile.model_call import Model, hugging_face_module, input_shape
from evenflow.compile.model_interface import ModelInterface
from evenflow.compile.monitoring import warn_once_about
from evenflow.compile.with_chunking import analysis_of_example

logger = logging.getLogger("evenflow")

# Arguments of generate() that mean the same to vLLM.
_TOKEN_ARGUMENTS = {"inputs", "input_ids", "attention_mask", "eos_token_id", "pad_token_id"}
_SAMPLING_ARGUMENTS = {"do_sample", "temperature", "top_k", "top_p", "repetition_penalty"}
_SHARED_ARGUMENTS = _TOKEN_ARGUMENTS | _SAMPLING_ARGUMENTS | {"max_new_tokens", "max_length"}


class VLLMChunkedModelWrapper(ModelInterface):
    """A model whose `generate` runs in `backend`: "vllm" with an engine, else "local".

    Forward passes are always local, since vLLM returns no logits. The tokens in `stats` are those of the input and, in
    vLLM, of the output.
    """

    def __init__(self, model: Model, model_id: str, chunking_threshold: int, engine: Any = None) -> None:
        super().__init__(model)
        self.model_id = model_id
        self.chunking_threshold = chunking_threshold
        self.engine = engine
        self.stats: dict[str, float] = {"calls": 0, "chunked_calls": 0, "tokens": 0, "seconds": 0.0}
        self._warn_of_local_call = warn_once_about(f"{model_id} generates in the local model, not in vLLM")

    @property
    def backend(self) -> str:
        return "local" if self.engine is None else "vllm"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = self.inner_model(*args, **kwargs)
        self._count(input_shape(args, kwargs), 0, time.perf_counter() - started)
        return output

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is not None:
            call = {**({"inputs": args[0]} if args else {}), **kwargs}
            reason = self._why_not_in_vllm(args, call)
            if reason is None:
                return self._generate_in_vllm(call)
            self._warn_of_local_call(reason)
        # Its forward passes come through this object, which counts them.
        return super().generate(*args, **kwargs)

    def _why_not_in_vllm(self, args: tuple[Any, ...], call: Mapping[str, Any]) -> str | None:
        if len(args) > 1 or not isinstance(call.get("inputs", call.get("input_ids")), Tensor):
            return "its input is not one tensor of token ids"
        unshared = [name for name, value in call.items() if name not in _SHARED_ARGUMENTS and value is not None]
        return f"vLLM has no {', '.join(unshared)}" if unshared else None

    def _generate_in_vllm(self, call: dict[str, Any]) -> Tensor:
        started = time.perf_counter()
        tokens: Tensor = call["inputs"] if "inputs" in call else call["input_ids"]
        mask = call.get("attention_mask")
        rows = [row if mask is None else row[mask[index].bool()] for index, row in enumerate(tokens)]
        prompts = [{"prompt_token_ids": row.tolist()} for row in rows]
        params = _sampling_params(self.wrapped_module.generation_config, call, tokens.shape[1])
        outputs = self.engine.generate(prompts, params, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        longest_prompt = max(len(row) for row in rows)
        num_tokens = sum(map(len, rows)) + sum(map(len, answers))
        self._count((len(rows), longest_prompt), num_tokens, time.perf_counter() - started)
        return _with_answers(tokens, answers, _pad_token(self.wrapped_module, call))

    def _count(self, shape: tuple[int, int], num_tokens: int, seconds: float) -> None:
        num_sequences, length = shape
        self.stats["calls"] += 1
        self.stats["chunked_calls"] += should_enable_chunked_prefill(length, self.chunking_threshold)
        self.stats["tokens"] += num_tokens or num_sequences * length
        self.stats["seconds"] += seconds


class EnhancedAOTWithVLLMChunking(ModelCompiler):
    """Wraps models in `VLLMChunkedModelWrapper`.

    They generate in `engine`; else in one started here, if vLLM is installed and the model's folder is known; else in
    the local model, compiled and in chunks. `chunking_threshold` None takes the threshold from `dataset_analysis`, or
    from the example inputs.
    """

    def __init__(
        self,
        base_compiler: EnhancedAOTModelCompiler | None = None,
        vllm_config: VLLMChunkedPrefillConfig | None = None,
        chunking_threshold: int | None = None,
        engine: Any = None,
        dataset_analysis: Analysis | None = None,
    ) -> None:
        self.base_compiler = base_compiler or EnhancedAOTModelCompiler()
        self.vllm_config = vllm_config or VLLMChunkedPrefillConfig()
        self.chunking_threshold = chunking_threshold
        self.engine = engine
        self.dataset_analysis = dataset_analysis

    def compile_model(self, model: Model, example_inputs: Any, model_id: str, **kwargs: Any) -> VLLMChunkedModelWrapper:
        threshold = self.chunking_threshold
        if threshold is None:
            analysis = self.dataset_analysis or analysis_of_example(model, example_inputs)
            decision = VLLMChunkedPrefillOptimizer().analyze_dataset_for_optimal_threshold(analysis)
            threshold = decision.threshold or DEFAULT_THRESHOLD
        engine = self.engine or self._start_engine(model, model_id)
        if engine is None:
            model = self.base_compiler.compile_model(model, example_inputs, model_id, **kwargs)
        if self.vllm_config.enable_chunked_prefill is not False:
            model = ChunkedPrefillWrapper(model, ChunkedPrefillOptimizer(enable_threshold=threshold), model_id)
        wrapper = VLLMChunkedModelWrapper(model, model_id, threshold, engine)
        logger.info("%s generates in %s.", model_id, "vLLM" if engine is not None else "the local model")
        return wrapper

    def _start_engine(self, model: Model, model_id: str) -> Any:
        config = getattr(hugging_face_module(model), "config", None)
        folder = Path(getattr(config, "_name_or_path", None) or "")
        if not (folder / "config.json").is_file():
            logger.info("%s: no vLLM, since the model's folder is not known.", model_id)
            return None
        if installed_version() is None:
            logger.info("%s: no vLLM, since it is not installed.", model_id)
            return None
        try:
            from vllm import LLM

            settings = self.vllm_config.to_engine_args()
            for name, note in settings.notes.items():
                logger.info("%s: %s: %s", model_id, name, note)
            # By default vLLM would halve the precision of a float32 model.
            dtype = str(hugging_face_module(model).dtype).removeprefix("torch.")
            return LLM(model=str(folder), dtype=dtype, **settings)
        except Exception as error:  # the local model still works
            logger.warning("%s: vLLM did not start: %s", model_id, error)
            return None


def create_vllm_enhanced_compiler(
    enable_cuda_graphs: bool = True,
    enable_chunked_prefill: bool = True,
    chunking_threshold: int | None = None,
    **other_kwargs: Any,
) -> EnhancedAOTWithVLLMChunking:
    """`engine`, `dataset_analysis` and `vllm_config` go to the class, other arguments to the base compiler."""
    own = {name: other_kwargs.pop(name) for name in ("engine", "dataset_analysis") if name in other_kwargs}
    config = other_kwargs.pop("vllm_config", None) or VLLMChunkedPrefillConfig()
    return EnhancedAOTWithVLLMChunking(
        create_enhanced_compiler(enable_cuda_graphs=enable_cuda_graphs, **other_kwargs),
        replace(config, enable_chunked_prefill=enable_chunked_prefill),
        chunking_threshold,
        **own,
    )


def _sampling_params(defaults: Any, call: Mapping[str, Any], prompt_length: int) -> Any:
    from vllm import SamplingParams

    def setting(name: str, default: Any) -> Any:
        value = call.get(name)
        value = getattr(defaults, name, None) if value is None else value
        return default if value is None else value

    max_tokens = setting("max_new_tokens", None)
    if max_tokens is None:
        max_tokens = setting("max_length", prompt_length + 20) - prompt_length
    eos = setting("eos_token_id", [])
    sampled = bool(setting("do_sample", False))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=setting("temperature", 1.0) if sampled else 0.0,
        top_p=setting("top_p", 1.0) if sampled else 1.0,
        top_k=setting("top_k", 50) if sampled else 0,
        repetition_penalty=setting("repetition_penalty", 1.0),
        stop_token_ids=[eos] if isinstance(eos, int) else list(eos),
        detokenize=False,
    )


def _pad_token(module: Any, call: Mapping[str, Any]) -> int:
    candidates = (call.get("pad_token_id"), module.generation_config.pad_token_id, module.config.eos_token_id, 0)
    pad = next(candidate for candidate in candidates if candidate is not None)
    return pad if isinstance(pad, int) else int(pad[0])


def _with_answers(tokens: Tensor, answers: list[list[int]], pad: int) -> Tensor:
    longest = max(map(len, answers))
    padded = torch.tensor([answer + [pad] * (longest - len(answer)) for answer in answers], dtype=tokens.dtype)
    return torch.cat((tokens, padded.to(tokens.device)), dim=1)
