from .api import KEYS as KEYS
from .api import PROVIDERS as PROVIDERS
from .costs import CostGauges as CostGauges
from .sandbox import end_boxes_of_dead_processes as end_boxes_of_dead_processes
from .sandbox import follow_costs as follow_costs
