"""The native attention against torch's, for mixes of decodes and chunks of every shape it takes."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenflow.model.config import ModelConfig, RopeConfig
from evenflow.model.cpu.attention import TorchStepAttention, attention_for
from evenflow.model.cpu.native_attention import NativeStepAttention, Span, has_native_attention
from evenflow.native import build
from tests.model.tiny import tiny_config


def _config(group: int = 3, num_kv_heads: int = 2, head_dim: int = 64, window: int | None = None) -> ModelConfig:
    return tiny_config(
        num_layers=2,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        rope=RopeConfig(theta=10000.0, rotary_dim=head_dim, scaling=None),
        layer_windows=(None, window),
        layer_uses_rope=(True, True),
    )


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if not has_native_attention(64):
        pytest.skip(f"no native kernels: {build.why_unavailable()}")


def _spans(config: ModelConfig, places: list[tuple[int, int]], seed: int, spare_heads: int = 0) -> list[Span]:
    """Random memory; with spare heads, slices of a larger one, whose strides do not follow from its shape."""
    generator = torch.Generator().manual_seed(seed)
    spans = []
    for start, length in places:
        size = (2, 2, config.num_kv_heads + spare_heads, start + length + 5, config.head_dim + 16 * spare_heads)
        memory = torch.randn(size, generator=generator)
        memory[:, :, :, start:] = float("nan")  # unwritten memory must not be read
        spans.append(Span(memory[:, :, spare_heads:, :, 16 * spare_heads :], start, length))
    return spans


def _packed(config: ModelConfig, num_rows: int) -> Tensor:
    size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(1))


def _check(config: ModelConfig, places: list[tuple[int, int]], seed: int = 0, spare_heads: int = 0) -> None:
    packed = _packed(config, sum(length for _, length in places))
    native_spans, torch_spans = (_spans(config, places, seed, spare_heads) for _ in range(2))
    native, reference = NativeStepAttention(config, native_spans), TorchStepAttention(config, torch_spans)
    for layer in range(2):
        torch.testing.assert_close(native(layer, packed), reference(layer, packed), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(native_spans, torch_spans, strict=True):
        torch.testing.assert_close(ours.kv, theirs.kv, rtol=0, atol=0, equal_nan=True)


_PLACES = st.tuples(
    st.one_of(st.integers(0, 80), st.integers(500, 1100)), st.one_of(st.just(1), st.integers(1, 8), st.integers(1, 150))
)


@settings(max_examples=60, deadline=None)
@given(
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12]),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 96, 128, 256]),
    window=st.one_of(st.none(), st.integers(1, 200)),
    places=st.lists(_PLACES, min_size=1, max_size=5),
    spare_heads=st.integers(0, 1),
)
@example(group=3, num_kv_heads=3, head_dim=64, window=None, places=[(0, 1)], spare_heads=0)
@example(group=3, num_kv_heads=3, head_dim=64, window=64, places=[(2000, 1), (1500, 30)], spare_heads=0)
@example(group=100, num_kv_heads=1, head_dim=32, window=7, places=[(40, 3), (600, 1)], spare_heads=0)
@example(group=1, num_kv_heads=2, head_dim=64, window=None, places=[(512, 1), (511, 1), (1024, 1)], spare_heads=1)
def test_same_as_torch(
    group: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    places: list[tuple[int, int]],
    spare_heads: int,
) -> None:
    _check(_config(group, num_kv_heads, head_dim, window), places, spare_heads=spare_heads)


@pytest.mark.parametrize("window", [None, 40])
def test_a_prompt_in_chunks_is_the_same_as_in_one(window: int | None) -> None:
    config, length = _config(window=window), 300
    packed = _packed(config, length)
    whole = NativeStepAttention(config, _spans(config, [(0, length)], 0))(1, packed).clone()
    for size in (1, 7, 64, 250):
        kv = _spans(config, [(0, length)], 0)[0].kv
        for start in range(0, length, size):
            rows = slice(start, min(start + size, length))
            found = NativeStepAttention(config, [Span(kv, start, rows.stop - start)])(1, packed[rows])
            torch.testing.assert_close(found, whole[rows], rtol=1e-5, atol=1e-5)


def test_scores_far_apart_stay_numbers() -> None:
    config = _config()
    packed = _packed(config, 40) * 200
    found = NativeStepAttention(config, _spans(config, [(0, 40)], 0))(0, packed)
    expected = TorchStepAttention(config, _spans(config, [(0, 40)], 0))(0, packed)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


def test_a_hidden_key_adds_nothing() -> None:
    config = _config()
    packed = _packed(config, 3)
    keys_and_values = packed[:, config.num_heads * config.head_dim :].view(3, 2, -1)
    keys_and_values[:2, 1] = 0.0  # what the first two rows see
    keys_and_values[2, 1] = 3e38
    attended = attention_for(config)(_spans(config, [(0, 3)], 0))(0, packed)
    assert not attended[:2].any()
    assert attended[2].all()


def test_same_on_several_threads() -> None:
    config, places = _config(), [(700, 1), (0, 200), (1300, 1), (900, 20)]
    packed, threads = _packed(config, 222), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(NativeStepAttention(config, _spans(config, places, 0))(0, packed))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_heads_that_it_does_not_take_run_on_torch() -> None:
    assert not has_native_attention(24)
    config = _config(head_dim=24)
    attention = attention_for(config)(_spans(config, [(0, 3)], 0))
    assert isinstance(attention, TorchStepAttention)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = _config()
    assert isinstance(attention_for(config)(_spans(config, [(0, 3)], 0)), NativeStepAttention)
    right = NativeStepAttention.__call__
    monkeypatch.setattr(NativeStepAttention, "__call__", lambda *arguments: right(*arguments) + 0.01)
    assert isinstance(attention_for(config)(_spans(config, [(0, 3)], 0)), TorchStepAttention)
    assert caplog.messages == ["Running attention on torch: the native kernel gives different results."]


@pytest.fixture
def _narrow(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build, "_FOR_THIS_CPU", (request.param,))
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path))
    build._loaded.cache_clear()
    yield
    build._loaded.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="names CPUs of x86, up to one with AVX2",
)
@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize("_narrow", ["-march=x86-64", "-march=haswell"], indirect=True)
def test_narrower_vectors_give_the_same() -> None:
    """The vector widths of other CPUs."""
    for group, head_dim in itertools.product((1, 3, 4, 9), (32, 80, 128)):
        _check(_config(group, 2, head_dim, window=50), [(600, 1), (3, 1), (0, 40), (590, 70), (20, 5)])
