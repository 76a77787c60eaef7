"""Files, prompts, defaults and checks that all rooms use."""
