"""How far off a result is and what it costs: dense baselines, sampled truth, tune, trust, judge."""
