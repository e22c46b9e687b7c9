"""Turn the lengths of a dataset into a decision about chunked prefill, and arguments for vLLM.

Run: python examples/advise.py [DATA [VLLM_VERSION]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from evenflow.advisor import VLLMChunkedPrefillOptimizer, preset_dataset
from evenflow.advisor.analysis import Analysis, DatasetTally, EstimatedTokens
from evenflow.advisor.recommendation import recommend
from evenflow.advisor.vllm_flags import NEWEST_VERSION, accepted_by, installed_version
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

    version = sys.argv[2] if len(sys.argv) > 2 else installed_version() or NEWEST_VERSION
    settings = recommend(Analysis.of([dataset]), decision, vllm_version=version).settings
    args = accepted_by(settings, version)
    print(f"EngineArgs(model=..., **{args})")
    for name, note in args.notes.items():
        print(f"  {name}: {note}")


if __name__ == "__main__":
    main()
