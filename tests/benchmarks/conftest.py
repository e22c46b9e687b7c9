import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(_BENCHMARKS / "gpu"), str(_BENCHMARKS / "claims"), str(_BENCHMARKS)]
