from .parser import ToolCallAttempt as ToolCallAttempt
