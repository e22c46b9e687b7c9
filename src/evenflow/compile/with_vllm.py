"""A compiler whose models generate in a vLLM engine if there is one, else in the local model in chunks."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from evenflow.advisor.decision import DEFAULT_THRESHOLD
from evenflow.advisor.vllm_config import DatasetStats, VLLMChunkedPrefillConfig, VLLMChunkedPrefillOptimizer
from evenflow.advisor.vllm_flags import (
    NEWEST_VERSION,
    EngineArgs,
    caps_lone_prompts,
    command_flags,
    installed_version,
)
from evenflow.compile.chunks.optimizer import ChunkedPrefillOptimizer, ChunkedPrefillWrapper, summed_calls
from evenflow.compile.compiler import EnhancedAOTModelCompiler, GraphConfig, create_enhanced_compiler
from evenflow.compile.model_call import Model, check_model, hugging_face_module, input_shape
from evenflow.compile.monitoring import warn_once_about
from evenflow.compile.with_chunking import analysis_of_examples

logger = logging.getLogger("evenflow")

# Arguments of generate() that mean the same to vLLM.
_TOKEN_ARGUMENTS = {"inputs", "input_ids", "attention_mask", "eos_token_id", "pad_token_id"}
_SAMPLING_ARGUMENTS = {"do_sample", "temperature", "top_k", "top_p", "repetition_penalty"}
_SHARED_ARGUMENTS = _TOKEN_ARGUMENTS | _SAMPLING_ARGUMENTS | {"max_new_tokens", "max_length"}


class VLLMChunkedModelWrapper(ChunkedPrefillWrapper):
    """A model whose `generate` runs in `backend`: "vllm" with an engine, else "local".

    Forward passes are always local, since vLLM returns no logits. The tokens in `stats` are those of the input and, in
    vLLM, of the output. A call is chunked if it was cut; in vLLM, if it has a prompt that the engine's settings do not
    let into one step. `engine_args` are the settings that an engine was started with here; without `cuts_prompts`,
    forward passes run whole.
    """

    def __init__(
        self,
        model: Model,
        model_id: str,
        chunking_threshold: int,
        engine: Any = None,
        engine_args: EngineArgs | None = None,
        *,
        cuts_prompts: bool = True,
    ) -> None:
        optimizer = ChunkedPrefillOptimizer(enable_threshold=chunking_threshold) if cuts_prompts else None
        super().__init__(model, optimizer, model_id)
        self.chunking_threshold = chunking_threshold
        self.engine = engine
        self.engine_args = engine_args or EngineArgs({}, {})
        self._num_tokens, self._seconds = 0, 0.0
        self._warn_of_local_call = warn_once_about(f"{model_id} generates in the local model, not in vLLM")

    @property
    def backend(self) -> str:
        return "local" if self.engine is None else "vllm"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = super().__call__(*args, **kwargs)
        num_sequences, length = input_shape(args, kwargs)
        self._num_tokens += num_sequences * length
        self._seconds += time.perf_counter() - started
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

    @property
    def stats(self) -> dict[str, float]:
        counts = self.execution_stats
        return {
            "calls": counts["total_calls"],
            "chunked_calls": counts["chunked_calls"],
            "tokens": self._num_tokens,
            "seconds": self._seconds,
        }

    def get_chunking_stats(self) -> dict[str, Any]:
        """As without vLLM; the optimizer's counts are those of forward passes."""
        own = {"backend": self.backend, "chunking_threshold": self.chunking_threshold}
        return {**super().get_chunking_stats(), **own}

    def get_performance_report(self) -> dict[str, Any]:
        """`stats`, the rate, and what vLLM was started with: settings, and a note for each that it does not take."""
        return {
            "backend": self.backend,
            **self.stats,
            "tokens_per_s": self._num_tokens / self._seconds if self._seconds else 0.0,
            "engine_args": dict(self.engine_args),
            "notes": dict(self.engine_args.notes),
        }

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
        uncached = [len(row) - (output.num_cached_tokens or 0) for row, output in zip(rows, outputs, strict=True)]
        self._count(max(uncached) > _tokens_per_step(self.engine, len(rows)))
        self._num_tokens += sum(map(len, rows)) + sum(map(len, answers))
        self._seconds += time.perf_counter() - started
        pad = _pad_token(self.wrapped_module, call)
        padded = pad_sequence([tokens.new_tensor(answer) for answer in answers], batch_first=True, padding_value=pad)
        return torch.cat((tokens, padded), dim=1)


class EnhancedAOTWithVLLMChunking(EnhancedAOTModelCompiler):
    """Wraps models in `VLLMChunkedModelWrapper`.

    They generate in `engine`; else in one started here, if vLLM is installed and the model's folder is known; else in
    the local model, compiled and in chunks. The threshold is `chunking_threshold`; if None, the one that suits
    `dataset_analysis` or the example inputs. An engine started here gets it as `long_prefill_token_threshold`, unless
    `vllm_config` has another value there than its default.
    """

    def __init__(
        self,
        base_compiler: Any = None,
        graph_config: GraphConfig | Mapping[str, Any] | None = None,
        vllm_config: VLLMChunkedPrefillConfig | None = None,
        chunking_threshold: int | None = None,
        engine: Any = None,
        dataset_analysis: DatasetStats | None = None,
        **compiler_settings: Any,
    ) -> None:
        super().__init__(base_compiler, graph_config, **compiler_settings)
        self.vllm_config = vllm_config or VLLMChunkedPrefillConfig()
        self.chunking_threshold = chunking_threshold
        self.engine = engine
        self.dataset_analysis = dataset_analysis
        self._models: weakref.WeakValueDictionary[str, VLLMChunkedModelWrapper] = weakref.WeakValueDictionary()

    def compile_model(self, model: Model, example_inputs: Any, model_id: str, **kwargs: Any) -> VLLMChunkedModelWrapper:
        check_model(model)
        threshold = self._threshold(model, example_inputs, model_id)
        engine, engine_args = self.engine, None
        if engine is None and (folder := _folder_for_vllm(model, model_id)) is not None:
            engine, engine_args = self._start_engine(model, model_id, folder, threshold)
        if engine is None:
            model = super().compile_model(model, example_inputs, model_id, **kwargs)
        cuts_prompts = self.vllm_config.enable_chunked_prefill is not False
        wrapper = VLLMChunkedModelWrapper(model, model_id, threshold, engine, engine_args, cuts_prompts=cuts_prompts)
        self._models[model_id] = wrapper
        logger.info("%s generates in %s.", model_id, "vLLM" if engine is not None else "the local model")
        return wrapper

    def get_performance_report(self) -> dict[str, Any]:
        """The compiler's report, and under `models` that of each model still in use."""
        models = {model_id: model.get_performance_report() for model_id, model in self._models.items()}
        return {**super().get_performance_report(), "models": models}

    def get_chunking_stats(self) -> dict[str, Any]:
        """Calls summed over the models still in use, and under `models` the statistics of each."""
        models = {model_id: model.get_chunking_stats() for model_id, model in self._models.items()}
        return {**summed_calls(models.values()), "models": models}

    def _threshold(self, model: Model, example_inputs: Any, model_id: str) -> int:
        if self.chunking_threshold is not None:
            return self.chunking_threshold
        analysis = self.dataset_analysis or analysis_of_examples(model, example_inputs)
        decision = VLLMChunkedPrefillOptimizer().analyze_dataset_for_optimal_threshold(analysis)
        threshold = decision.threshold or DEFAULT_THRESHOLD
        logger.info("%s: inputs over %s tokens are cut: %s.", model_id, threshold, decision.reason)
        return threshold

    def engine_args_for(self, model: Model, threshold: int) -> EngineArgs:
        """What the installed vLLM takes of the configuration, with the threshold in it."""
        name, own = "long_prefill_token_threshold", self.vllm_config.long_prefill_token_threshold
        if own not in (None, DEFAULT_THRESHOLD):
            threshold = own
        args = replace(self.vllm_config, long_prefill_token_threshold=threshold).to_engine_args()
        longest = hugging_face_module(model).config.get_text_config().max_position_embeddings
        why = None
        if self.vllm_config.enable_chunked_prefill is False:
            why = "nothing is cut"
        elif threshold > longest:  # vLLM refuses it
            why = f"{threshold:,} is over the model's length of {longest:,} tokens"
        if why is None:
            return args
        return EngineArgs({key: args[key] for key in args if key != name}, {**args.notes, name: f"left out: {why}"})

    def _start_engine(self, model: Model, model_id: str, folder: Path, threshold: int) -> tuple[Any, EngineArgs | None]:
        try:
            from vllm import LLM

            args = self.engine_args_for(model, threshold)
            for name, note in args.notes.items():
                logger.info("%s: %s: %s", model_id, name, note)
            # By default vLLM would halve the precision of a float32 model.
            args["dtype"] = str(hugging_face_module(model).dtype).removeprefix("torch.")
            args["enforce_eager"] = not self.graph_config.enable_cuda_graphs
            logger.info("%s: vLLM starts with %s.", model_id, " ".join(command_flags(args)))
            return LLM(model=str(folder), **args), args
        except Exception as error:  # the local model still works
            logger.warning("%s: vLLM did not start: %s", model_id, error)
            return None, None


def create_vllm_enhanced_compiler(
    enable_cuda_graphs: bool = True,
    enable_chunked_prefill: bool = True,
    chunking_threshold: int | None = None,
    *,
    vllm_config: VLLMChunkedPrefillConfig | None = None,
    engine: Any = None,
    dataset_analysis: DatasetStats | None = None,
    **other_kwargs: Any,
) -> EnhancedAOTWithVLLMChunking:
    """`other_kwargs`, among them `graph_config` and `base_compiler`, go to `create_enhanced_compiler`.

    Without CUDA graphs vLLM runs eagerly.
    """
    vllm_config = vllm_config or VLLMChunkedPrefillConfig()
    return EnhancedAOTWithVLLMChunking(
        create_enhanced_compiler(enable_cuda_graphs=enable_cuda_graphs, **other_kwargs),
        vllm_config=replace(vllm_config, enable_chunked_prefill=enable_chunked_prefill),
        chunking_threshold=chunking_threshold,
        engine=engine,
        dataset_analysis=dataset_analysis,
    )


def _folder_for_vllm(model: Model, model_id: str) -> Path | None:
    """The model's folder, if vLLM is there to load it."""
    config = getattr(hugging_face_module(model), "config", None)
    folder = Path(getattr(config, "_name_or_path", None) or "")
    if not (folder / "config.json").is_file():
        logger.info("%s: no vLLM, since the model's folder is not known.", model_id)
        return None
    if installed_version() is None:
        logger.info("%s: no vLLM, since it is not installed.", model_id)
        return None
    return folder


def _tokens_per_step(engine: Any, num_prompts: int) -> float:
    """The most tokens of one prompt that a vLLM engine takes in one step, while `num_prompts` run."""
    config = getattr(getattr(engine, "llm_engine", None), "vllm_config", None)
    if config is None or not config.scheduler_config.enable_chunked_prefill:
        return math.inf
    scheduler = config.scheduler_config
    cap: int = scheduler.long_prefill_token_threshold
    is_capped = cap > 0 and (num_prompts > 1 or caps_lone_prompts(installed_version() or NEWEST_VERSION))
    budget: int = scheduler.max_num_batched_tokens
    return min(budget, cap) if is_capped else budget


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
