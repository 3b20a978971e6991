from .environment import SOLVE_OUTPUT as SOLVE_OUTPUT
from .environment import HarborEnvironment as HarborEnvironment
from .folders import find_task_folders as find_task_folders
from .folders import read_task as read_task
from .folders import tasks_of as tasks_of
from .packing import packed as packed
from .task import HarborTask as HarborTask
from .task import HarborTaskError as HarborTaskError
