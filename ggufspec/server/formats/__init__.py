"""How a chat template writes reasoning and tool calls: found by rendering it, then parsed."""
