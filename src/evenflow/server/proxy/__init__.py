"""A host engine behind evenflow's front."""
