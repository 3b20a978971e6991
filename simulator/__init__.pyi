from .config import Simulation as Simulation
from .load import BadSetup as BadSetup
from .load import changed as changed
from .load import of_file as of_file
from .pipeline import simulate as simulate
from .split import advised as advised
from .stage import StuckSimulation as StuckSimulation
