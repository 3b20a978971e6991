from .rounds import function_of as function_of
from .wrong import Name as Name
from .wrong import apply_all as apply_all
from .wrong import wrong_tests as wrong_tests
