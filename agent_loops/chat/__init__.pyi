from .calls import name_of as name_of
from .chat import chat_of as chat_of
from .chat import new_budget as new_budget
from .model_files import load_tokenizer as load_tokenizer
from .template import Message as Message
from .verification import tools_problem as tools_problem
from .verification import verify_template as verify_template
