from .stack import FILES as FILES
from .stack import IMAGE_USER as IMAGE_USER
from .stack import Stack as Stack
from .stack import make_stack as make_stack
