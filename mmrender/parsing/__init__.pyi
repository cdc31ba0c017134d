from .grammars import GRAMMARS as GRAMMARS
from .parser import ParsedResponse as ParsedResponse
from .parser import ResponseParser as ResponseParser
from .parser import ToolCallAttempt as ToolCallAttempt
