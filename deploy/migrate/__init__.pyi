from .convert import Migrated as Migrated
from .convert import migrate as migrate
from .given import BadSource as BadSource
from .given import read_given as read_given
from .table import ABSENT as ABSENT
from .table import load_table as load_table
