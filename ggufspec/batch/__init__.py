"""Many prompts over worker processes, durably. No click, no echo."""
