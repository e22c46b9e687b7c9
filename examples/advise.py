"""Turn the lengths of a dataset into a decision about chunked prefill, and arguments for vLLM.

Run: python examples/advise.py [DATA [VLLM_VERSION]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from evenflow.advisor import VLLMChunkedPrefillConfig, VLLMChunkedPrefillOptimizer, preset_dataset
from evenflow.advisor.analysis import DatasetTally, EstimatedTokens
from evenflow.workload.reading import ReadTally, read_inputs


def main() -> None:
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        tally, read = DatasetTally(path.name, EstimatedTokens()), ReadTally()
        for item in read_inputs(path, None, read):  # one at a time, because the file may be large
            tally.add(item)
        dataset = tally.analysis(read.unusable)
    else:
        dataset = preset_dataset("retrieval")
    decision = VLLMChunkedPrefillOptimizer().analyze_dataset_for_optimal_threshold(dataset)
    print(f"{dataset.name}: {decision.decision}, because {decision.reason}")

    args = VLLMChunkedPrefillConfig().to_engine_args(sys.argv[2] if len(sys.argv) > 2 else None)
    print(f"EngineArgs(model=..., **{args})")
    for name, note in args.notes.items():
        print(f"  {name}: {note}")


if __name__ == "__main__":
    main()
