"""What all engines mean: geometry, noise, the order of candidates, scores, draws, clusters."""
