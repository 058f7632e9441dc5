"""Speed against what the hardware gives: training step, generation, all-reduce."""
