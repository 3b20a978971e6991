from .build import build_image as build_image
from .build import has_image as has_image
from .orphans import clear_away_dead_processes as clear_away_dead_processes
