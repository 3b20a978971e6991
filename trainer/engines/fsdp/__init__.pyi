from .adapter_states import AdapterPlace as AdapterPlace
from .adapter_states import AdapterState as AdapterState
from .engine import FSDPEngine as FSDPEngine
from .experts import check_experts_of as check_experts_of
from .models import Policy as Policy
from .models import load_policy as load_policy
from .shell import local_part as local_part
from .trial import try_model as try_model
