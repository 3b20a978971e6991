from .base import ParsedTurn as ParsedTurn
from .base import ParserName as ParserName
from .base import ToolCall as ToolCall
from .base import ToolCallParser as ToolCallParser
from .base import get_parser as get_parser
