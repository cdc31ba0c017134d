from .parser import ParsedResponse as ParsedResponse
from .parser import ToolCallAttempt as ToolCallAttempt
