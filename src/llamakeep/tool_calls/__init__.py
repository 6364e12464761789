"""Tool calls and thoughts in what models write: told apart, parsed as they come, forced.

Pure: of no API, no server and no llama.cpp.
"""

from llamakeep.tool_calls.formats import FAMILIES, GENERIC, Format, format_of
from llamakeep.tool_calls.parser import Parser
from llamakeep.tool_calls.reasoning import Thoughts, is_closed, is_left_open, is_open, thoughts_of
from llamakeep.tool_calls.values import (
    AUTO,
    NONE,
    REQUIRED,
    CallArguments,
    CallBegins,
    Content,
    Delta,
    Reasoning,
    Reply,
    Said,
    Tool,
    ToolCall,
    ToolChoice,
)

__all__ = [
    "AUTO",
    "FAMILIES",
    "GENERIC",
    "NONE",
    "REQUIRED",
    "CallArguments",
    "CallBegins",
    "Content",
    "Delta",
    "Format",
    "Parser",
    "Reasoning",
    "Reply",
    "Said",
    "Thoughts",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "format_of",
    "is_closed",
    "is_left_open",
    "is_open",
    "thoughts_of",
]
