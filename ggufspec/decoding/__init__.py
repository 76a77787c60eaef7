"""The algorithm on token ids: the loop, sampling, verification rules and statistics."""
