from .check import CheckedTask as CheckedTask
from .check import Checker as Checker
from .check import check_config as check_config
from .check import select as select
