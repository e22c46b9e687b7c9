"""Turn the lengths of a dataset into a decision about chunked prefill, and arguments for vLLM.

Run: python examples/advise.py [DATA [VLLM_VERSION]]
"""

from __future__ import annotations

import sys

from evenflow.advisor import VLLMChunkedPrefillConfig, VLLMChunkedPrefillOptimizer, analyze, preset_dataset


def main() -> None:
    dataset = analyze(sys.argv[1]).datasets[0] if len(sys.argv) > 1 else preset_dataset("retrieval")
    decision = VLLMChunkedPrefillOptimizer().analyze_dataset_for_optimal_threshold(dataset)
    print(f"{dataset.name}: {decision.decision}, because {decision.reason}")

    args = VLLMChunkedPrefillConfig().to_engine_args(sys.argv[2] if len(sys.argv) > 2 else None)
    print(f"EngineArgs(model=..., **{args})")
    for name, note in args.notes.items():
        print(f"  {name}: {note}")


if __name__ == "__main__":
    main()
