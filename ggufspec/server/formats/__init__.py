"""Derives the syntax of reasoning and tool calls from a chat template, and parses answers."""
