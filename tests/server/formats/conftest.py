"""The formats of templates, found once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ggufspec.engine.chat_template import ChatTemplate, TemplateProcess
from ggufspec.server.formats.chat_format import ChatFormat, format_of


@pytest.fixture(scope="session")
def template_process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


@pytest.fixture(scope="session")
def template(template_process: TemplateProcess) -> Callable[[str], ChatTemplate]:
    """Templates by their source; the same object for the same source."""
    made: dict[str, ChatTemplate] = {}

    def get(source: str) -> ChatTemplate:
        if source not in made:
            made[source] = ChatTemplate(
                source, bos_text="<s>", eos_text="</s>", process=template_process
            )
        return made[source]

    return get


@pytest.fixture(scope="session")
def chat_format(template: Callable[[str], ChatTemplate]) -> Callable[[str], ChatFormat]:
    """Formats by the source of their templates."""
    found: dict[str, ChatFormat] = {}

    def get(source: str) -> ChatFormat:
        if source not in found:
            found[source] = format_of(template(source))
        return found[source]

    return get
