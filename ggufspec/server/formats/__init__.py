"""How a chat template writes reasoning and tool calls: found by rendering it, then parsed."""

from ggufspec.server.formats.chat_format import ChatFormat as ChatFormat
from ggufspec.server.formats.chat_format import format_of as format_of
from ggufspec.server.formats.deltas import CallDelta as CallDelta
from ggufspec.server.formats.deltas import ChatDelta as ChatDelta
from ggufspec.server.formats.deltas import ChatParser as ChatParser
from ggufspec.server.formats.deltas import ContentDelta as ContentDelta
from ggufspec.server.formats.deltas import ReasoningDelta as ReasoningDelta
from ggufspec.server.formats.grammar import GrammarMaker as GrammarMaker
