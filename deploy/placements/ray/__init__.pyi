from .actor import ActorLife as ActorLife
from .actor import ProcessState as ProcessState
from .cluster import bundle_of as bundle_of
from .cluster import check_machines as check_machines
from .cluster import connect as connect
from .cluster import environment_of as environment_of
from .placement import RayMember as RayMember
from .registry import parse_counts as parse_counts
