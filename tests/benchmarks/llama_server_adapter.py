"""Starts a server with llama-server's command line, as llama.cpp's test suite writes it.

Options that `ggufspec serve` does not have are left out, and the tests that need them fail. The
environment says which server is started and where the models are (`Adapter`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_VARIABLE = "GGUFSPEC_SUITE_SERVER"

# llama-server falls back to ChatML for models without a template, and has names for some.
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA_3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_NAMED_TEMPLATES = {"chatml": _CHATML, "llama3": _LLAMA_3}
_SLOTS = 4


@dataclass(frozen=True)
class Adapter:
    """The command to start, and the files of the suite's models by their repository."""

    command: list[str]
    is_llama_server: bool
    models: dict[str, str]

    def to_environment(self) -> dict[str, str]:
        """The variable that `from_environment` reads."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @staticmethod
    def from_environment() -> Adapter:
        """What the parent process passed on."""
        return Adapter(**json.loads(os.environ[_VARIABLE]))

    def arguments(self, given: Sequence[str]) -> list[str]:
        """The whole command line of the server."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--hf-repo")
        parser.add_argument("--hf-file")
        parser.add_argument("--offline", action="store_true")
        options, rest = parser.parse_known_args(given)
        found = ["-m", self.models[options.hf_repo]] if options.hf_repo else []
        if self.is_llama_server:
            return [*self.command, *found, *rest]
        return [*self.command, *found, *_translated(rest)]


def _translated(given: Sequence[str]) -> list[str]:
    """Options of `ggufspec serve` for llama-server's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("port", "host", "alias", "api-key", "temp", "seed"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--ctx-size", type=int)
    parser.add_argument("--parallel", type=int, default=_SLOTS)
    parser.add_argument("--chat-template")
    parser.add_argument("--chat-template-file")
    options, _ = parser.parse_known_args(given)
    arguments = ["--slots", str(options.parallel)]
    for name in ("port", "host", "alias", "api_key", "temp", "seed"):
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name.replace('_', '-')}", value]
    if options.ctx_size:  # llama-server's is of all slots together
        arguments += ["--ctx-size", str(options.ctx_size // options.parallel)]
    template = options.chat_template_file
    if template is None:
        named = options.chat_template or "chatml"
        template = f"{os.environ['TMPDIR']}/{os.getpid()}.jinja"
        Path(template).write_text(_NAMED_TEMPLATES.get(named, named))
    return [*arguments, "--chat-template-file", template]


if __name__ == "__main__":
    line = Adapter.from_environment().arguments(sys.argv[1:])
    os.execvp(line[0], line)
