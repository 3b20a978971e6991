from .chrome import chrome_trace as chrome_trace
from .slices import Process as Process
from .slices import Slice as Slice
from .slices import lanes as lanes
