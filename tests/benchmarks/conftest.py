import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(_BENCHMARKS / name) for name in ("gpu", "claims", "hosts", "shares", "")]
