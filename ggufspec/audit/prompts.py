"""The prompts of an audit that is given no file."""

from __future__ import annotations

PROMPTS = (
    "The old house at the end of the road had been empty for years, until",
    "Dear Sir,\n\nI am writing to you because",
    "The three most important things to know about water are",
    '"Where have you been?" she asked. He',
    "def fibonacci(n):\n",
    "Q: Why is the sky blue?\nA:",
    "1. Wash the potatoes.\n2.",
    "In the year 1815, after the battle of",
)
