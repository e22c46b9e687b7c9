"""evenflow's latency target inside SGLang, and how SGLang is started. Importing this package does not import SGLang."""
