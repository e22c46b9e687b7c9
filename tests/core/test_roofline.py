"""The roofline against what an H200 took with an 8B model under vLLM, and the names by which devices are found."""

from __future__ import annotations

import pytest

from evenflow.core.plan import AttentionWaves, ExecutorCaps
from evenflow.core.roofline import DEVICES, ModelWork, WaveKernel, attention_waves, known_device, roofline
from evenflow.core.step_costs import figures_of

LLAMA_8B = ModelWork(
    num_layers=32, row_flops=15e9, weight_bytes=15e9, position_flops=4.0 * 32 * 4096, cache_bytes=131_072
)
H200 = roofline(LLAMA_8B, DEVICES["H200"])
CAPS = ExecutorCaps()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_devices_are_known_by_the_name_that_the_driver_gives(name: str, found: str) -> None:
    assert known_device(name) is DEVICES[found]


@pytest.mark.parametrize(
    "name",
    ["", "cpu", "Apple M3", "Radeon 780M", "NVIDIA GeForce GTX 1080", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA T400"],
)
def test_other_devices_are_unknown(name: str) -> None:
    assert known_device(name) is None


def test_a_decode_step_reads_the_weights_and_the_cache() -> None:
    def seconds(num_decodes: int, context: int) -> float:
        return H200.seconds(figures_of(CAPS.step_shape(num_decodes=num_decodes, decode_context=context)))

    assert seconds(1, 0) == seconds(64, 0) == pytest.approx(3.6e-3, rel=0.05)
    assert seconds(64, 65_536) - seconds(64, 0) == pytest.approx(65_536 * 131_072 / 4.14e12, rel=0.01)


def test_a_row_beyond_the_knee_takes_as_long_as_measured() -> None:
    assert H200.row == pytest.approx(0.02e-3, rel=0.06)
    assert 128 < H200.knee < 256


def test_a_long_prefill_takes_about_as_long_as_measured() -> None:
    seconds = H200.seconds(figures_of(CAPS.prefill_shape(0, 32_768)))
    assert 1.19 / 1.3 < seconds < 1.19 * 1.3


@pytest.mark.parametrize(
    ("rows", "padded"),
    [
        (1, 32),
        (32, 32),
        (100, 128),
        (130, 170),
        (192, 256),
        (256, 256),
        (257, 512),
        (512, 512),
        (513, 1024),
    ],
)
def test_attention_takes_whole_waves_of_tiles(rows: int, padded: int) -> None:
    """On an H200, 32 heads that share 8 of keys and values: 16 tiles of 32 rows at a time."""
    waves = attention_waves(32, 8, DEVICES["H200"])
    assert waves is not None
    assert waves.padded_rows(rows) == padded
    shape = ExecutorCaps(attention_waves=waves).step_shape(chunks=[(1000, rows)])
    assert shape.wave_attention == padded * (2 * 1000 + rows + 1) // 2
    assert shape.prefill_attention == rows * (2 * 1000 + rows + 1) // 2


@pytest.mark.parametrize(
    "waves", [AttentionWaves(32, 16), AttentionWaves(128, 4, is_split=False), AttentionWaves(128, 1)]
)
def test_after_whole_waves_one_row_more_takes_longer(waves: AttentionWaves) -> None:
    for rows in range(1, 2000):
        whole = waves.whole_rows(rows)
        assert whole <= rows
        assert waves.padded_rows(whole) < waves.padded_rows(whole + 1)
        assert waves.padded_rows(rows) == waves.padded_rows(whole + 1) or whole == rows


@pytest.mark.parametrize(("rows", "padded"), [(1, 512), (512, 512), (513, 1024), (1025, 1536)])
def test_flashinfers_tiles_hold_one_head_and_are_not_split(rows: int, padded: int) -> None:
    waves = attention_waves(32, 8, DEVICES["H200"], WaveKernel.FLASHINFER)
    assert waves is not None
    assert waves.padded_rows(rows) == padded


def test_waves_are_known_of_hopper_gpus_alone() -> None:
    assert attention_waves(32, 8, DEVICES["A100"]) is None
    assert attention_waves(160, 160, DEVICES["H200"]) is None
    assert attention_waves(160, 8, DEVICES["H200"], WaveKernel.FLASHINFER) is None
    assert CAPS.step_shape(chunks=[(0, 100)]).wave_attention == 0


def test_the_prior_prices_attention_once() -> None:
    waves = attention_waves(32, 8, DEVICES["H200"])
    in_waves = roofline(LLAMA_8B, DEVICES["H200"], waves)
    assert (in_waves.attention, in_waves.wave_attention) == (0.0, H200.attention)
    assert H200.wave_attention == 0.0
