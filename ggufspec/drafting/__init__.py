"""Drafting strategies, the draft length, and the costs and acceptance rates that decide it."""
