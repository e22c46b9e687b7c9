"""Opens a mutated file as evenflow does, asks the model if it loads, and says what came of it.

A file may be refused, or answer, or fail with a reason: an error of evenflow on one line. Everything else is a finding.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from evenflow.core.grammar import Grammar
from evenflow.core.request import SamplingParams
from evenflow.engine.llm import LLM
from evenflow.engine.outputs import RequestOutput
from evenflow.errors import EvenflowError, InvalidRequest, printable
from evenflow.host import cache_folder
from evenflow.model.formats.inspection import describe_model
from tests.fuzz.mutants import GGUF, MANIFEST, STEP_TIMES, TARGETS, Mutant
from tests.fuzz.seeds import folder_seed, sharded_seed

REFUSED, ANSWERED, FAILED, FINDING = "refused", "answered", "failed with a reason", "finding"
_KV_BYTES = 4 << 20
_MAX_CHARACTERS = 2000  # of a reason
_CONVERSATION = [{"role": "user", "content": "hello <|im_end|>"}]


class Trial:
    """One worker's folders: a model in each form, in which one file at a time is replaced by a mutant."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._log = _Log()
        self._seeds = {"folder": folder_seed(), "sharded": sharded_seed()}
        for name, files in (*self._seeds.items(), ("outside", self._seeds["folder"])):
            (root / name).mkdir(parents=True)
            for file, content in files.items():
                (root / name / file).write_bytes(content)
        (root / "cache" / "step-times").mkdir(parents=True)
        os.environ["EVENFLOW_CACHE"] = str(root / "cache")

    def run(self, mutant: Mutant, random: Random) -> tuple[str, str]:
        """The outcome, and its reason."""
        self._log.records.clear()
        try:
            outcome, reason = self._try(mutant, random)
        except EvenflowError as error:
            outcome, reason = REFUSED, str(error)
        except BaseException as error:  # a panic of a library in Rust is not an Exception
            return FINDING, _signature(error)
        if (raised := self._log.foreign_error) is not None:
            return FINDING, f"in a step: {raised}"
        if outcome != ANSWERED and (not reason.isprintable() or not 0 < len(reason) < _MAX_CHARACTERS):
            return FINDING, f"not a reason on one line: {reason[:200]!a}"
        return outcome, reason

    def _try(self, mutant: Mutant, random: Random) -> tuple[str, str]:
        if mutant.file == MANIFEST:
            return _try_manifest(self.root / "artifacts", mutant.content)
        if mutant.file in (STEP_TIMES, TARGETS):
            return self._try_step_times(mutant, random)
        model = self._place(mutant)
        try:
            describe_model(model)
            # A target makes a start measure step times, which takes longer than all the rest.
            policies = ("fixed:64", "fixed:5", "unchunked", "target:50ms")
            chats = "template" in mutant.file or mutant.file == "tokenizer_config.json"
            return _ask(model, random, policy=random.choices(policies, (50, 5, 44, 1))[0], chats=chats)
        finally:
            self._restore(mutant)

    def _place(self, mutant: Mutant) -> Path:
        if mutant.file == GGUF:
            path = self.root / GGUF
            path.write_bytes(mutant.content)
            return path
        folder = self.root / ("sharded" if mutant.file.endswith(".index.json") else "folder")
        (folder / mutant.file).write_bytes(mutant.content)
        return folder

    def _restore(self, mutant: Mutant) -> None:
        for name, files in self._seeds.items():
            path = self.root / name / mutant.file
            if mutant.file in files:
                path.write_bytes(files[mutant.file])
            else:
                path.unlink(missing_ok=True)

    def _try_step_times(self, mutant: Mutant, random: Random) -> tuple[str, str]:
        """A start with a damaged cache works as one without: it may never fail."""
        folder = cache_folder() / "step-times"
        stored = next(folder.glob("*.json"), None)
        if stored is None:
            _ask(self.root / "folder", random, policy="target:50ms")
            stored = next(folder.glob("*.json"))
        path = stored if mutant.file == STEP_TIMES else stored.with_suffix(".targets")
        before = stored.read_bytes()
        try:
            path.write_bytes(mutant.content)
            policy = "target:50ms" if mutant.file == STEP_TIMES and random.random() < 0.9 else None
            outcome, reason = _ask(self.root / "folder", random, policy=policy)
        finally:
            stored.write_bytes(before)
        return (outcome, reason) if outcome == ANSWERED else (FINDING, f"a damaged cache fails the start: {reason}")


def _try_manifest(folder: Path, content: bytes) -> tuple[str, str]:
    """The notes on a compiled model. The package beside them is code: its hash is in the same file."""
    from evenflow.compile.aot.artifacts import ArtifactStore, DamagedArtifact
    from evenflow.compile.aot.packages import read_constants

    folder.mkdir(exist_ok=True)
    package = folder / "model.pt2"
    package.write_bytes(b"package")
    digest = hashlib.sha256(b"package").hexdigest().encode()
    (folder / "model.json").write_bytes(content.replace(b'"sha256": ""', b'"sha256": "%s"' % digest))
    try:
        artifact = ArtifactStore(folder).find("model")
        if artifact is None:
            return REFUSED, "there is none"
        read_constants(artifact.notes.get("constants"), torch.device("cpu"))
    except DamagedArtifact as error:
        return REFUSED, printable(str(error))  # logged, and compiled again
    return ANSWERED, ""


def _ask(model: Path, random: Random, policy: str | None, *, chats: bool = False) -> tuple[str, str]:
    """Load the model and ask it in several ways at once; it answers if one of them does."""
    weights = random.choice(("float32", "float32", "int4"))
    with LLM(model, policy=policy, weights=weights, threads=1, kv_cache_memory=_KV_BYTES, seed=0) as llm:
        length = random.choice((1, 1, 1, 3))
        greedy = SamplingParams(max_tokens=length, temperature=0.0, logprobs=2, prompt_logprobs=1)
        drawn = SamplingParams(max_tokens=length, temperature=1.0, top_p=0.9, seed=7, min_tokens=length)
        chosen = SamplingParams(max_tokens=length, temperature=0.0, grammar=Grammar.choice(["yes", "no"]))
        asked: list[tuple[Callable[[], str | list[int]], SamplingParams]] = [
            (lambda: "Hello, hello 12", greedy),
            (lambda: [1, 5, 6, 7, 3], drawn),
        ]
        if chats or random.random() < 0.2:
            asked.append((lambda: llm.encode_chat(_CONVERSATION), drawn))
        if random.random() < 0.1:
            asked.append((lambda: "a", chosen))
        reasons = []
        for prompt, params in asked:
            try:
                llm.add(llm.prepare(prompt(), params))
            except InvalidRequest as error:
                reasons.append(str(error))
        outputs = _run(llm)
        assert llm.tokenizer.longest_token_bytes >= 0  # which a server reads
    reasons += [output.error for output in outputs if output.error]
    return (FAILED, reasons[0]) if len(reasons) == len(asked) else (ANSWERED, "")


def _run(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.engine.has_work:
        outputs += [delta.output for delta in llm.step() if delta.finish_reason is not None]
    for output in outputs:
        _check(output, llm)
    return outputs


def _check(output: RequestOutput, llm: LLM) -> None:
    """An answer is made of tokens of the model with real probabilities, or it is an error."""
    vocab_size = llm.engine.limits.vocab_size
    assert (output.finish_reason == "error") == bool(output.error), f"finish_reason {output.finish_reason}"
    assert output.error or output.token_ids, "an answer without tokens"
    assert all(0 <= token < vocab_size for token in output.token_ids), "a token outside the vocabulary"
    rows = [*(output.logprobs or []), *(output.prompt_logprobs or [])] if not output.error else []
    for row in rows:
        assert not math.isnan(row.chosen.logprob), "a logprob that is not a number"
    output.text.encode()


class _Log(logging.Handler):
    """Keeps what evenflow logs: a step that fails is logged with its error."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        logging.getLogger("evenflow").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def foreign_error(self) -> str | None:
        for record in self.records:
            error = record.exc_info[1] if record.exc_info else None
            if error is not None and not isinstance(error, EvenflowError):
                return _signature(error)
        return None


def _signature(error: BaseException) -> str:
    """The error and where evenflow raised it, without what differs from mutant to mutant."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/evenflow/" in frame.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "the fuzzer"
    message = re.sub(r"\d+", "N", str(error).partition("\n")[0])[:120]
    return f"{type(error).__name__} in {place}: {ascii(message)[1:-1]}"
