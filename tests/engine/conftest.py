"""The process that renders chat templates, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ggufspec.engine.chat_template import TemplateProcess


@pytest.fixture(scope="session")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess()
    yield made
    made.close()
