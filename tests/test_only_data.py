"""What evenflow reads from files and sockets is data: no pickle, no code. What it writes for itself is private."""

from __future__ import annotations

import ast
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from evenflow.core.policies import PolicySpec
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine import messages
from evenflow.engine.recorder import Recorder
from evenflow.executors.fake import FakeExecutor
from evenflow.framing import FrameReader

SOURCES = sorted((Path(__file__).parent.parent / "src").rglob("*.py"))
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load", "os.system"}
# A program that is there to run the code of a model's answer, in a sandbox.
ALLOWED = {("judge.py", "exec"), ("judge.py", "compile")}


def test_no_module_reads_code() -> None:
    assert len(SOURCES) > 100
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            assert not UNSAFE_MODULES & _imported(node), where
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in UNSAFE_CALLS or (path.name, called) in ALLOWED, where
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) != "True", where


def _imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {name.name.partition(".")[0] for name in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


class _Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (1,)


def test_a_pickle_on_a_socket_is_no_message() -> None:
    content = pickle.dumps(_Payload())
    [frame] = FrameReader().feed(len(content).to_bytes(4, "big") + content)
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    assert kinds
    for kind in kinds:
        if kind is not msgspec.Struct:
            with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
                msgspec.msgpack.decode(frame, type=kind)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_a_recording_is_for_its_owner(tmp_path: Path) -> None:
    executor = FakeExecutor(vocab_size=10, block_size=16)
    config = SchedulerConfig(num_blocks=4, policy=PolicySpec.parse("fixed:16"))
    Recorder(tmp_path / "run.jsonl", Scheduler(config, executor.caps)).close()
    assert permissions(tmp_path / "run.jsonl") == 0o600


@pytest.mark.usefixtures("open_umask")
def test_folders_of_code_are_for_their_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenflow.native import build

    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path))
    assert permissions(build._library_folder()) == 0o700
