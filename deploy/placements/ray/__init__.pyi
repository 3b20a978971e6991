from .board import parse_counts as parse_counts
from .bundles import bundle_of as bundle_of
from .bundles import check_machines as check_machines
