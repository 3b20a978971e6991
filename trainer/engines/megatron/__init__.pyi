from .settings import check_model as check_model
from .settings import find_python as find_python
