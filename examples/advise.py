"""Turn the lengths of a dataset into a decision about chunked prefill, and arguments for vLLM.

Run: python examples/advise.py [DATA [VLLM_VERSION]]
"""

from __future__ import annotations

import sys

from evenflow.advisor import VLLMChunkedPrefillOptimizer, analyze, preset_dataset
from evenflow.advisor.analysis import Analysis
from evenflow.advisor.recommendation import recommend
from evenflow.advisor.vllm_flags import NEWEST_VERSION, accepted_by, installed_version


def main() -> None:
    dataset = analyze(sys.argv[1]).datasets[0] if len(sys.argv) > 1 else preset_dataset("retrieval")
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
