"""A transformers model as an endpoint: compiled by `evenflow.compile`, long prompts in chunks unless turned off.

It answers one request at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from evenflow.bench.endpoints import Answer, Ask, Scores
from evenflow.errors import EvenflowError, InvalidRequest, MissingDependency, ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_EXAMPLE_TOKENS = 47


class TransformersEndpoint:
    """`name` is how the user wrote it; `folder` holds the model and its tokenizer."""

    def __init__(self, name: str, folder: str, *, chunked: bool) -> None:
        self.name = name
        self._folder = folder
        self._is_chunked = chunked
        self._turn = asyncio.Lock()
        self._model: Any = None
        self._tokenizer: Any = None
        self._optimizer: Any = None

    @property
    def max_model_len(self) -> int | None:
        found = getattr(getattr(self._model, "config", None), "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self._load)
        yield

    def _load(self) -> None:
        from evenflow.compile import create_enhanced_compiler_with_chunking

        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise MissingDependency(f"{self.name} needs {error.name}: pip install 'evenflow[compile]'") from error
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self._folder, dtype=torch.float32, local_files_only=True
            ).eval()
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        except OSError as error:
            raise ModelNotFound(
                f"Got {self.name!r} but transformers finds no model and tokenizer in {self._folder!r}."
            ) from error
        except ValueError as error:
            raise UnsupportedModel(f"{self.name}: {error}") from error
        compiler = create_enhanced_compiler_with_chunking(enable_chunked_prefill=self._is_chunked)
        example = torch.ones(1, _EXAMPLE_TOKENS, dtype=torch.long)
        self._model = compiler.compile_model(model, example, self._folder)
        self._optimizer = compiler.chunked_optimizer

    async def begin_round(self) -> None:
        """Nothing to prepare."""

    async def stream(self, ask: Ask, answer: Answer) -> None:
        async with self._turn:
            await _run_here(self._generate, ask, answer)

    def _generate(self, ask: Ask, answer: Answer) -> None:
        import torch
        from transformers import StoppingCriteriaList
        from transformers.generation.streamers import BaseStreamer

        tokenizer, token_ids = self._tokenizer, self._encode_ask(ask)
        length = len(token_ids)
        self._check_length(length + ask.max_tokens)

        class Pieces(BaseStreamer):  # type: ignore[misc]
            """Notes when each token comes; the first call brings the prompt."""

            has_prompt = False

            def put(self, value: torch.Tensor) -> None:
                if self.has_prompt:
                    answer.add_piece("", 1)
                self.has_prompt = True

            def end(self) -> None:
                """The text is decoded as a whole."""

        def decode(ids: Any) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        def is_stopped(ids: torch.Tensor, _: object, **__: object) -> bool:
            text = decode(ids[0, length:])
            return any(stop in text for stop in ask.stop)

        settings: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "do_sample": False, "streamer": Pieces()}
        if ask.ignore_eos:
            settings["min_new_tokens"] = ask.max_tokens
        if ask.stop:
            settings["stopping_criteria"] = StoppingCriteriaList([is_stopped])
        num_chunks = self._optimizer.stats["chunks_processed"]
        prompt = torch.tensor([token_ids])
        with torch.inference_mode():
            output = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        text = decode(output[0, length:])
        ends = [place for stop in ask.stop if (place := text.find(stop)) >= 0]
        answer.text = text[: min(ends, default=len(text))]
        answer.num_prompt_tokens = length
        answer.num_chunks = int(self._optimizer.stats["chunks_processed"] - num_chunks) or 1

    async def score(self, prompt: str, continuations: Sequence[str]) -> Scores:
        async with self._turn:
            return await _run_here(self._score, prompt, continuations)

    def _score(self, prompt: str, continuations: Sequence[str]) -> Scores:
        import torch

        num_context, logprobs, num_prompt_tokens = len(self._encode(prompt)), [], 0
        for continuation in continuations:
            token_ids = self._encode(prompt + continuation)
            self._check_length(len(token_ids))
            with torch.inference_mode():
                logits = self._model(torch.tensor([token_ids])).logits[0, num_context - 1 : -1]
            chosen = torch.tensor(token_ids[num_context:])[:, None]
            logprobs.append(float(logits.float().log_softmax(-1).gather(1, chosen).sum()))
            num_prompt_tokens += len(token_ids)
        return Scores(logprobs, num_prompt_tokens)

    def _encode_ask(self, ask: Ask) -> list[int]:
        if ask.messages is not None:
            if self._tokenizer.chat_template is None:
                raise InvalidRequest(f"Got messages but the tokenizer of {self.name} has no chat template.")
            text = self._tokenizer.apply_chat_template(ask.messages, tokenize=False, add_generation_prompt=True)
            return self._encode(text, add_special_tokens=False)
        return self._encode(ask.prompt) if isinstance(ask.prompt, str) else list(ask.prompt)

    def _encode(self, text: str, **settings: Any) -> list[int]:
        return [int(token_id) for token_id in self._tokenizer(text, **settings)["input_ids"]]

    def _check_length(self, num_tokens: int) -> None:
        if (context := self.max_model_len) is not None and num_tokens > context:
            raise InvalidRequest(f"Got {num_tokens} tokens of prompt and answer but the context holds {context}.")


async def _run_here(work: Callable[..., T], *arguments: Any) -> T:
    """On a thread, so that the event loop goes on. What transformers raises is the failure of this one request."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except EvenflowError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise InvalidRequest(f"transformers: {type(error).__name__}: {error}") from error
