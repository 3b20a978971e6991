from .react import ToolAgentLoop as ToolAgentLoop
from .react import final_answer as final_answer
from .react import read_settings as read_settings
from .react import with_system as with_system
