"""What runs a StepPlan: the protocol, a deterministic fake, a replay of a recording, and torch."""
