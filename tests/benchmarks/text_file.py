"""A timed text, and the file that a benchmark appends each of its texts to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ggufspec.errors import OptionError


class Cell(NamedTuple):
    """Where contenders are compared. `target` has the name of a quantization in its name."""

    target: str
    sampling: str
    kind: str

    @property
    def temperature(self) -> float:
        """0: greedy."""
        return float(self.sampling.partition("/")[0])

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.target}, {self.sampling}, {self.kind}"


@dataclass(frozen=True)
class Text:
    """One timed text. `at`: seconds since the epoch; `wall_seconds` include prompt and loading."""

    target: str
    sampling: str
    kind: str
    prompt: str
    run: int
    contender: str
    tokens_per_second: float
    n_generated: int
    n_drafted: int
    n_accepted: int
    wall_seconds: float
    at: float

    @property
    def cell(self) -> Cell:
        """Where it is compared."""
        return Cell(self.target, self.sampling, self.kind)

    @property
    def turn(self) -> tuple[str, str, str, int]:
        """What it shares with the texts that it is compared with."""
        return (self.target, self.sampling, self.prompt, self.run)


class TextFile:
    """Appends a line of JSON for each text to a file, behind a line about the run."""

    def __init__(
        self, path: Path | None, about: Mapping[str, Any], texts: list[Text], *, resume: bool
    ) -> None:
        """Raises OptionError if the file is of another run."""
        self.texts = texts
        self._path = path
        self.cache_folder = path and path.with_name(f"{path.name}.cache")
        if resume and path is None:
            raise OptionError("--resume needs the file to continue; give -o texts.jsonl")
        if path is None:
            return
        if not path.exists():
            self._append({"about": about})
            return
        if not resume:
            raise OptionError(f"{path} exists; continue it with --resume, or name another file")
        before, found = read_texts(path)
        same = ("settings", "pairs")
        if [before.get(name) for name in same] != [about[name] for name in same]:
            raise OptionError(
                f"{path} was written with other models or settings: {before.get('settings')} and "
                f"{before.get('pairs')}; give the same, or name another file"
            )
        texts += found
        lines = [{"about": before}, *map(asdict, found)]  # without a line that was cut off
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def add(self, text: Text) -> None:
        """Keep a text."""
        self.texts.append(text)
        self._append(asdict(text))

    def _append(self, document: Mapping[str, Any]) -> None:
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(document) + "\n")


def read_texts(path: Path) -> tuple[dict[str, Any], list[Text]]:
    """What an output says about its run, and its texts; a last line that was cut off is ignored."""
    first, *lines = path.read_text().splitlines(keepends=True)
    texts = [Text(**json.loads(line)) for line in lines if line.endswith("\n")]
    about: dict[str, Any] = json.loads(first)["about"]
    return about, texts
